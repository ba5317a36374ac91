"""Source of the kernels that combine arrays on a device, and convert between float32 and half precision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from string import Template

MOST_PARTS = 64
"""Maximum number of arrays that one kernel combines. Each adds an argument and code."""

WIDEST = 16
"""Bytes that a thread reads of an array at once, which is the maximum of a GPU."""

_UNSIGNED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_SIGNED = {1: "signed char", 2: "short", 4: "int", 8: "long long"}

_INTEGERS = {
    **{f"uint{8 * size}": (name, size) for size, name in _UNSIGNED.items()},
    **{f"int{8 * size}": (name, size) for size, name in _SIGNED.items()},
}
HALVES = ("float16", "bfloat16")
_REALS = {"float32": "float", "float64": "double"}
_COMPLEX = {"complex64": "float", "complex128": "double"}

ITEMSIZE = {
    "bool": 1,
    **{name: size for name, (_, size) in _INTEGERS.items()},
    **dict.fromkeys(HALVES, 2),
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""The dtypes that have kernels, and the bytes of an element."""

_BITS = {"band": "a & b", "bor": "a | b", "bxor": "a ^ b"}
_LOGIC = {"land": "a & b", "lor": "a | b", "lxor": "a ^ b"}
_INTEGER_ORDER = {"min": "b < a ? b : a", "max": "a < b ? b : a"}
# A NaN wins, as in numpy.
_REAL_ORDER = {"min": "a != a || less(a, b) ? a : b", "max": "a != a || less(b, a) ? a : b"}
_REAL_ARITHMETIC = {"sum": "add(a, b)", "avg": "add(a, b)", "prod": "multiply(a, b)"}
_INTEGER_ARITHMETIC = {"sum": "a + b", "prod": "a * b"}
_COMPLEX_SUM = "Wide{add(a.re, b.re), add(a.im, b.im)}"
_COMPLEX_PRODUCT = (
    "Wide{subtract(multiply(a.re, b.re), multiply(a.im, b.im)), add(multiply(a.re, b.im), multiply(a.im, b.re))}"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel: a loop over ``i``. Its parameters are numbers of 64 bits, named in `parameters`; the first is the
    number of elements, of which a pass through the loop processes `lanes` or one."""

    name: str
    parameters: tuple[str, ...]
    operation: str
    preamble: str
    lanes: int = 1

    @property
    def program(self) -> str:
        """The kernel in CUDA C++, a function named `name`, for any number of threads."""
        return _PROGRAM.substitute(
            preamble=self.preamble,
            name=self.name,
            parameters=", ".join(f"const unsigned long long {one}" for one in self.parameters),
            count=self.parameters[0],
            lanes=self.lanes,
            operation=self.operation,
        )


_PROGRAM = Template("""${preamble}
extern "C" __global__ void ${name}(${parameters}) {
    const unsigned long long all = ${count} / ${lanes} + ${count} % ${lanes};
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += stride) {
        ${operation}
    }
}
""")


@dataclass(frozen=True, slots=True)
class _Meaning:
    """The combination of elements in C++: the type of elements in memory, the type in which they are combined, and
    the expressions that convert between both, combine `a` and `b`, and finish the total `x` of `count`."""

    item: str
    wide: str
    combine: str
    widen: str = "x"
    narrow: str = "x"
    finish: str = "x"


@lru_cache(maxsize=1024)
def _meaning(op: str, dtype: str) -> _Meaning | None:
    if op == "premul_sum":
        op = "sum"
    if dtype == "bool":
        names = {"min": "land", "max": "lor", "band": "land", "bor": "lor", "bxor": "lxor"}
        combine = _LOGIC.get(names.get(op, op))
        return None if combine is None else _Meaning(_UNSIGNED[1], "int", combine, "x != 0")
    if dtype in _INTEGERS:
        return _of_integers(op, *_INTEGERS[dtype])
    if dtype in HALVES:
        combine = {**_REAL_ARITHMETIC, **_REAL_ORDER}.get(op)
        finish = "divide(x, (float)count)" if op == "avg" else "x"
        widen, narrow = f"from_{dtype}(x)", f"to_{dtype}(x)"
        return None if combine is None else _Meaning(_UNSIGNED[2], "float", combine, widen, narrow, finish)
    if dtype in _REALS:
        real = _REALS[dtype]
        combine = {**_REAL_ARITHMETIC, **_REAL_ORDER}.get(op)
        finish = f"divide(x, ({real})count)" if op == "avg" else "x"
        return None if combine is None else _Meaning(real, real, combine, finish=finish)
    if dtype in _COMPLEX:
        combine = {"sum": _COMPLEX_SUM, "avg": _COMPLEX_SUM, "prod": _COMPLEX_PRODUCT}.get(op)
        finish = f"divide(x, ({_COMPLEX[dtype]})count)" if op == "avg" else "x"
        return None if combine is None else _Meaning("Complex", "Complex", combine, finish=finish)
    return None


def _of_integers(op: str, name: str, size: int) -> _Meaning | None:
    if op in ("sum", "prod"):
        # Unsigned, since unsigned overflow wraps.
        wide = _UNSIGNED[max(size, 4)]
        return _Meaning(name, wide, _INTEGER_ARITHMETIC[op], f"({wide})x", f"({name})x")
    if op in _LOGIC:
        return _Meaning(name, "int", _LOGIC[op], "x != 0", f"({name})x")
    combine = {**_INTEGER_ORDER, **_BITS}.get(op)
    return None if combine is None else _Meaning(name, name, combine)


def known(op: str, dtype: str) -> bool:
    """Return True if there is a kernel for the reduction `op` on arrays of `dtype`."""
    return _meaning(op, dtype) is not None


def alignment(dtype: str) -> int:
    """Return the alignment in bytes that each array must have."""
    return ITEMSIZE[dtype] // 2 if dtype in _COMPLEX else ITEMSIZE[dtype]


def width(dtype: str, addresses: int) -> int:
    """Return the bytes that a thread can read at once from arrays, given the bitwise or of their addresses; at least
    those of one element."""
    item = ITEMSIZE[dtype]
    return next((one for one in (WIDEST, 4) if one > item and addresses % one == 0), item)


def threads(dtype: str, elements: int, width: int) -> int:
    """Return the size of the loop over `elements` elements."""
    lanes = width // ITEMSIZE[dtype]
    return elements // lanes + elements % lanes


def fold(op: str, dtype: str, parts: int, outs: int, width: int, *, wide_first: bool, wide_last: bool) -> Source:
    """Return the kernel that writes the combination of `parts` arrays, in their order, to each of `outs` arrays.

    All have `dtype`, and `n` elements; of half precision the first part may be float32 (`wide_first`), and so may the
    outs (`wide_last`). A thread reads all that it needs before it writes, so an out may be a part. avg divides by
    `count`. The parameters are n, count, and the addresses p0, p1, ... and o0, o1, ...
    """
    meaning = _meaning(op, dtype)
    assert meaning is not None, f"no kernel combines {dtype} by {op}"
    ins = [f"p{place}" for place in range(parts)]
    ends = [f"o{place}" for place in range(outs)]
    first = meaning.wide if wide_first else meaning.item
    lanes = width // ITEMSIZE[dtype]
    addresses = ", ".join([*ins, *ends])
    shape = f"{'f' if wide_first else ''}{parts}{'f' if wide_last else ''}_{outs}"
    return Source(
        name=f"mpicoll_{op}_{dtype}_{shape}_{width}",
        parameters=("n", "count", *ins, *ends),
        operation=_one(addresses) if lanes == 1 else _several(addresses, lanes, width),
        lanes=lanes,
        preamble=_PREAMBLE.substitute(
            reals="" if dtype == "bool" or dtype in _INTEGERS else _REAL_FUNCTIONS,
            complex=_COMPLEX_TYPE.substitute(real=_COMPLEX[dtype]) if dtype in _COMPLEX else "",
            halves=_HALF_FUNCTIONS if dtype in HALVES else "",
            item=meaning.item,
            wide=meaning.wide,
            first=first,
            last=meaning.wide if wide_last else meaning.item,
            combine=meaning.combine,
            widen=meaning.widen,
            widen_first="x" if wide_first else meaning.widen,
            finish=meaning.finish,
            narrow="x" if wide_last else meaning.narrow,
            parameters=", ".join(f"Number {one}" for one in [*ins, *ends]),
            body="\n".join([*_reads(ins), *_writes(ends)]),
        ),
    )


def _one(addresses: str) -> str:
    return f"mpicoll::step<1, alignof(mpicoll::Item)>(i, count, {addresses});"


def _several(addresses: str, lanes: int, width: int) -> str:
    # Elements that do not fill a whole step are left to threads that process one element each.
    return (
        f"const mpicoll::Number whole = n / {lanes}, at = i;\n"
        f"if (at < whole) mpicoll::step<{lanes}, {width}>(at, count, {addresses});\n"
        f"else mpicoll::step<1, alignof(mpicoll::Item)>(whole * {lanes - 1} + at, count, {addresses});"
    )


_AT_ONCE = 8
"""Arrays that a thread reads before it combines: concurrent reads hide each other's latency."""


def _reads(ins: list[str]) -> list[str]:
    lines = []
    for begin in range(0, len(ins), _AT_ONCE):
        group = ins[begin : begin + _AT_ONCE]
        lines += [
            f"    const Pack<{'First' if name == 'p0' else 'Item'}, V, A> x_{name} = "
            f"((const Pack<{'First' if name == 'p0' else 'Item'}, V, A>*){name})[at];"
            for name in group
        ]
        lines += [
            f"    for (int j = 0; j < V; j++) t[j] = widen_first(x_{name}.at[j]);"
            if name == "p0"
            else f"    for (int j = 0; j < V; j++) t[j] = combine(t[j], widen(x_{name}.at[j]));"
            for name in group
        ]
    return lines


def _writes(ends: list[str]) -> list[str]:
    return [
        "    for (int j = 0; j < V; j++) y.at[j] = narrow(finish(t[j], count));",
        *(f"    ((Pack<Last, V, A>*){name})[at] = y;" for name in ends),
    ]


_PREAMBLE = Template("""
#ifdef __CUDACC__
#define MPICOLL_INLINE __device__ __forceinline__
#else
#define MPICOLL_INLINE static inline
#endif
namespace mpicoll {
typedef unsigned long long Number;
template <typename Of, int V, int A> struct alignas(A > alignof(Of) ? A : alignof(Of)) Pack { Of at[V]; };
${reals}${complex}${halves}
typedef ${item} Item;
typedef ${wide} Wide;
typedef ${first} First;
typedef ${last} Last;
MPICOLL_INLINE Wide widen(Item x) { return ${widen}; }
MPICOLL_INLINE Wide widen_first(First x) { return ${widen_first}; }
MPICOLL_INLINE Wide combine(Wide a, Wide b) { return ${combine}; }
MPICOLL_INLINE Wide finish(Wide x, Number count) { return ${finish}; }
MPICOLL_INLINE Last narrow(Wide x) { return ${narrow}; }
template <int V, int A> MPICOLL_INLINE void step(Number at, Number count, ${parameters}) {
    Wide t[V];
    Pack<Last, V, A> y;
${body}
}
}
""")

# cupy compiles float32 so that subnormal numbers are flushed, which the host keeps; and products are fused with sums.
_REAL_FUNCTIONS = """
#ifdef __CUDA_ARCH__
#define MPICOLL_FLOAT(name, instruction) \\
    MPICOLL_INLINE float name(float a, float b) { \\
        float c; \\
        asm(instruction ".rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); \\
        return c; \\
    }
MPICOLL_FLOAT(add, "add")
MPICOLL_FLOAT(subtract, "sub")
MPICOLL_FLOAT(multiply, "mul")
MPICOLL_FLOAT(divide, "div")
MPICOLL_INLINE bool less(float a, float b) {
    int c;
    asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.s32 %0, 1, 0, p; }" : "=r"(c) : "f"(a), "f"(b));
    return c;
}
MPICOLL_INLINE double add(double a, double b) { return __dadd_rn(a, b); }
MPICOLL_INLINE double subtract(double a, double b) { return __dsub_rn(a, b); }
MPICOLL_INLINE double multiply(double a, double b) { return __dmul_rn(a, b); }
MPICOLL_INLINE double divide(double a, double b) { return __ddiv_rn(a, b); }
MPICOLL_INLINE bool less(double a, double b) { return a < b; }
#else
template <typename T> MPICOLL_INLINE T add(T a, T b) { return a + b; }
template <typename T> MPICOLL_INLINE T subtract(T a, T b) { return a - b; }
template <typename T> MPICOLL_INLINE T multiply(T a, T b) { return a * b; }
template <typename T> MPICOLL_INLINE T divide(T a, T b) { return a / b; }
template <typename T> MPICOLL_INLINE bool less(T a, T b) { return a < b; }
#endif
"""

_COMPLEX_TYPE = Template("""
struct Complex { ${real} re, im; };
// As numpy divides by a number without an imaginary part.
MPICOLL_INLINE Complex divide(Complex x, ${real} by) {
    const ${real} scale = divide((${real})1, by), none = 0;
    const ${real} re = add(x.re, multiply(x.im, none)), im = subtract(x.im, multiply(x.re, none));
    return Complex{multiply(re, scale), multiply(im, scale)};
}
""")

_HALF_FUNCTIONS = """
union Bits { float value; unsigned int bits; };
MPICOLL_INLINE unsigned int bits_of(float x) { Bits b; b.value = x; return b.bits; }
MPICOLL_INLINE float float_of(unsigned int x) { Bits b; b.bits = x; return b.value; }
MPICOLL_INLINE float from_bfloat16(unsigned short x) { return float_of((unsigned int)x << 16); }
MPICOLL_INLINE unsigned short to_bfloat16(float x) {
    const unsigned int b = bits_of(x);
    if ((b & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (unsigned short)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
#ifdef __CUDA_ARCH__
MPICOLL_INLINE float from_float16(unsigned short x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
MPICOLL_INLINE unsigned short to_float16(float x) {
    unsigned short y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}
#else
MPICOLL_INLINE float from_float16(unsigned short x) {
    const unsigned int sign = (unsigned int)(x & 0x8000) << 16, exponent = (x >> 10) & 31, fraction = x & 0x3ff;
    if (exponent == 31) return float_of(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return float_of(sign | bits_of((float)fraction * (1.0f / (1 << 24))));
    return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}
MPICOLL_INLINE unsigned short to_float16(float x) {
    const unsigned int b = bits_of(x) & 0x7fffffff, sign = (bits_of(x) >> 16) & 0x8000;
    if (b > 0x7f800000) return (unsigned short)(sign | 0x7e00);
    if (b >= 0x477ff000) return (unsigned short)(sign | 0x7c00);
    // Below the normal numbers the sum with 1/2 rounds to multiples of the smallest half.
    if (b < 0x38800000) return (unsigned short)(sign | (bits_of(float_of(b) + 0.5f) - 0x3f000000));
    return (unsigned short)(sign | (b - 0x38000000 + 0xfff + ((b >> 13) & 1)) >> 13);
}
#endif
"""
