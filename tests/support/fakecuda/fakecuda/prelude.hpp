// What kernels in CUDA C++ find that C++ on the host has not. No header: to read what it declares would take a compilation
// longer than the kernel itself.
#define __device__
#define __host__
#define __global__ __attribute__((visibility("hidden")))
#define __forceinline__ inline
#define __restrict__ __restrict

// A kernel is called for one thread after the other, and ranks that are threads run the same one.
struct FakecudaPlace {
  unsigned x, y, z;
};
static thread_local FakecudaPlace gridDim = {1, 1, 1}, blockDim = {1, 1, 1}, blockIdx, threadIdx;

static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dsub_rn(double x, double y) { return x - y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __ddiv_rn(double x, double y) { return x / y; }

// An argument: 64 bits, whatever the kernel takes them for.
struct FakecudaValue {
  unsigned long long bits;
  operator unsigned long long() const { return bits; }
  template <typename T> operator T*() const { return (T*)bits; }
};
