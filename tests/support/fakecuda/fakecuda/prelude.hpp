// What kernels of cupy find that C++ on the host has not. No header where a builtin of the compiler will do: to read what
// the headers declare takes a compilation longer than the kernel itself.
#include <stddef.h>
#include <stdint.h>

#ifdef FAKECUDA_COMPLEX
#include <complex>
template <typename T> using complex = std::complex<T>;
#endif

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __restrict__ __restrict

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

#ifdef FAKECUDA_COMPLEX
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;
#else
template <typename T> static inline bool isfinite(T x) { return __builtin_isfinite(x); }
template <typename T> static inline bool isinf(T x) { return __builtin_isinf(x); }
template <typename T> static inline bool isnan(T x) { return __builtin_isnan(x); }
template <typename T> static inline bool signbit(T x) { return __builtin_signbit(x); }
#endif

template <typename To, typename From> static inline To fakecuda_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

static inline float __uint_as_float(unsigned x) { return fakecuda_bits<float>(x); }
static inline float __int_as_float(int x) { return fakecuda_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return fakecuda_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return fakecuda_bits<int>(x); }
static inline double __longlong_as_double(long long x) { return fakecuda_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return fakecuda_bits<long long>(x); }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1 / x; }
static inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dsub_rn(double x, double y) { return x - y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __ddiv_rn(double x, double y) { return x / y; }

// CUDA's have all mixtures of integers; of floats they return the one that isn't NaN.
template <typename T, typename U> static inline auto min(T x, U y) -> decltype(x + y) {
  typedef decltype(x + y) W;
  if constexpr ((W)0.5 != 0) return (W)__builtin_fmin(x, y);
  else return (W)y < (W)x ? (W)y : (W)x;
}
template <typename T, typename U> static inline auto max(T x, U y) -> decltype(x + y) {
  typedef decltype(x + y) W;
  if constexpr ((W)0.5 != 0) return (W)__builtin_fmax(x, y);
  else return (W)x < (W)y ? (W)y : (W)x;
}

class float16 {
  _Float16 data_;

 public:
  float16() {}
  float16(float v) : data_((_Float16)v) {}
  explicit float16(bool v) : data_((_Float16)(float)v) {}
  explicit float16(double v) : data_((_Float16)v) {}
  explicit float16(int v) : data_((_Float16)v) {}
  explicit float16(unsigned v) : data_((_Float16)v) {}
  explicit float16(long long v) : data_((_Float16)v) {}
  explicit float16(unsigned long long v) : data_((_Float16)v) {}
  operator float() const { return (float)data_; }
  unsigned short to_bits() const { return fakecuda_bits<unsigned short>(data_); }
  static float16 from_bits(unsigned short v) {
    float16 made;
    __builtin_memcpy(&made, &v, sizeof(v));
    return made;
  }
  int isnan() const { return (to_bits() & 0x7fffu) > 0x7c00u; }
  int isinf() const { return (to_bits() & 0x7fffu) == 0x7c00u; }
  int isfinite() const { return (to_bits() & 0x7c00u) != 0x7c00u; }
  template <typename T> float16& operator+=(const T& rhs) { return *this = float16((float)*this + (float)rhs); }
  template <typename T> float16& operator-=(const T& rhs) { return *this = float16((float)*this - (float)rhs); }
  template <typename T> float16& operator*=(const T& rhs) { return *this = float16((float)*this * (float)rhs); }
  template <typename T> float16& operator/=(const T& rhs) { return *this = float16((float)*this / (float)rhs); }
};
static inline bool isnan(float16 x) { return x.isnan(); }
static inline float16 operator+(float16 x, float16 y) { return float16((float)x + (float)y); }
static inline float16 operator-(float16 x, float16 y) { return float16((float)x - (float)y); }
static inline float16 operator*(float16 x, float16 y) { return float16((float)x * (float)y); }
static inline float16 operator/(float16 x, float16 y) { return float16((float)x / (float)y); }
static inline float16 min(float16 x, float16 y) { return float16(__builtin_fminf(x, y)); }
static inline float16 max(float16 x, float16 y) { return float16(__builtin_fmaxf(x, y)); }

// The argument of a kernel that the kernel indexes itself.
template <typename T> class CArray {
  T* data_;
  ptrdiff_t size_;

 public:
  CArray(char* data, ptrdiff_t size) : data_((T*)data), size_(size) {}
  ptrdiff_t size() const { return size_; }
  T& operator[](ptrdiff_t i) const { return data_[i]; }
};

class Indexer {
  long long size_;
  long long i_ = 0;

 public:
  explicit Indexer(long long size) : size_(size) {}
  ptrdiff_t size() const { return size_; }
  ptrdiff_t get() const { return i_; }
  void set(long long i) { i_ = i; }
};

static inline ptrdiff_t at(long long i, int ndim, const long long* shape, const long long* strides) {
  if (ndim == 1) return i * strides[0];
  ptrdiff_t offset = 0;
  for (int axis = ndim - 1; axis >= 0; --axis) {
    offset += (i % shape[axis]) * strides[axis];
    i /= shape[axis];
  }
  return offset;
}
