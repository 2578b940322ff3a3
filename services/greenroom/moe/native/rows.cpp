// A few rows through bf16 weights at the speed of memory, and a gated expert as one call. Plain C interface, for ctypes.
//
// Threads are those of the OpenMP runtime that torch computes with, handed in as two function pointers: a pool of our
// own would share the cores with that one's spinning threads.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

typedef void (*ParallelFn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*ThreadNumberFn)();

ParallelFn gomp_parallel = nullptr;
ThreadNumberFn thread_number = nullptr;

// Rows of bf16 as floats, even and odd elements apart; stride and padding are whole vectors, the padding is zero.
struct Split {
  float *even, *odd;
  size_t words, stride;
};

struct Linear {
  const uint32_t *weights;
  size_t outputs, rows;
  uint16_t *out;
};

struct Expert {
  const uint32_t *up, *down;
  size_t inner, hidden, rows;
  const int64_t *tokens;  // the row of `out` of each row; null: its own number
  const float *scales;
  uint16_t *out;
  bool add;
};

inline float to_float(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

inline uint16_t to_bf16(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  if (value != value) return (uint16_t)(word >> 16 | 0x40);
  return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

constexpr size_t PADDING = 16;

// Memory of this thread for one split, kept for the next call.
struct Scratch {
  std::vector<float> numbers;
  Split split(size_t rows, size_t elements) {
    size_t words = elements / 2, stride = (words + PADDING - 1) / PADDING * PADDING;
    if (numbers.size() < 2 * rows * stride + PADDING) numbers.resize(2 * rows * stride + PADDING);
    float *first = (float *)(((uintptr_t)numbers.data() + 63) / 64 * 64);
    Split split{first, first + rows * stride, words, stride};
    for (size_t r = 0; r < rows; r++)
      for (size_t j = words; j < stride; j++) split.even[r * stride + j] = split.odd[r * stride + j] = 0;
    return split;
  }
};

void fill(Split &split, const uint16_t *rows, const int64_t *tokens, size_t count) {
  for (size_t r = 0; r < count; r++) {
    const uint16_t *row = rows + (tokens ? tokens[r] : (int64_t)r) * 2 * split.words;
    float *even = split.even + r * split.stride, *odd = split.odd + r * split.stride;
    for (size_t j = 0; j < split.words; j++) {
      even[j] = to_float(row[2 * j]);
      odd[j] = to_float(row[2 * j + 1]);
    }
  }
}

#if defined(__x86_64__)
#if defined(__clang__)
#define BEGIN_AVX512 _Pragma("clang attribute push(__attribute__((target(\"avx512f\"))), apply_to=function)")
#define BEGIN_AVX2 _Pragma("clang attribute push(__attribute__((target(\"avx2,fma\"))), apply_to=function)")
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_AVX512 _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,prefer-vector-width=512\")")
#define BEGIN_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma\")")
#define END_TARGET _Pragma("GCC pop_options")
#endif

BEGIN_AVX512
namespace avx512 {
constexpr int LANES = 16, TILE_WEIGHTS = 4, TILE_ROWS = 4;
#include "rows_kernel.inc"
}
END_TARGET

BEGIN_AVX2
namespace avx2 {
constexpr int LANES = 8, TILE_WEIGHTS = 2, TILE_ROWS = 4;
#include "rows_kernel.inc"
}
END_TARGET
#else
namespace plain {
constexpr int LANES = 4, TILE_WEIGHTS = 4, TILE_ROWS = 4;
#include "rows_kernel.inc"
}
#endif

struct Kernels {
  const char *name;
  void (*hidden)(const Expert &, const Split &, Split &, size_t rows, size_t begin, size_t end);
  void (*output)(const Expert &, const Split &, size_t begin, size_t end);
  void (*linear)(const Linear &, const Split &, size_t begin, size_t end);
};

Kernels choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return {"avx512", avx512::hidden_part, avx512::output_part, avx512::linear_part};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {"avx2", avx2::hidden_part, avx2::output_part, avx2::linear_part};
  return {nullptr, nullptr, nullptr, nullptr};
#else
  return {"plain", plain::hidden_part, plain::output_part, plain::linear_part};
#endif
}

const Kernels kernels = choose();

// Runs `part(begin, end)` over [0, count) in as many parts as there are threads, cut at multiples of `grain`.
template <class Part>
void spread(size_t count, size_t grain, unsigned threads, Part part) {
  if (threads <= 1 || !gomp_parallel) {
    part(0, count);
    return;
  }
  struct Job {
    size_t count, grain;
    unsigned threads;
    Part *part;
  } job{count, grain, threads, &part};
  gomp_parallel(
      [](void *data) {
        Job &job = *(Job *)data;
        size_t blocks = (job.count + job.grain - 1) / job.grain, me = thread_number();
        size_t begin = blocks * me / job.threads * job.grain, end = blocks * (me + 1) / job.threads * job.grain;
        if (end > job.count) end = job.count;
        if (begin < end) (*job.part)(begin, end);
      },
      &job, threads, 0);
}

}  // namespace

extern "C" {

// The instruction set in use; null: this processor has none that this was written for.
const char *greenroom_instruction_set() { return kernels.name; }

void greenroom_use_threads(void *parallel, void *number) {
  gomp_parallel = (ParallelFn)parallel;
  thread_number = (ThreadNumberFn)number;
}

// out[rows, outputs] = x[rows, inputs] · weights[outputs, inputs]^T, all bf16, sums in fp32. `inputs` is even.
void greenroom_linear(const void *weights, const void *x, void *out, int64_t rows, int64_t inputs, int64_t outputs,
                      unsigned threads) {
  thread_local Scratch scratch;
  Split split = scratch.split(rows, inputs);
  fill(split, (const uint16_t *)x, nullptr, rows);
  Linear job{(const uint32_t *)weights, (size_t)outputs, (size_t)rows, (uint16_t *)out};
  spread(outputs, 4, threads, [&](size_t begin, size_t end) { kernels.linear(job, split, begin, end); });
}

// One expert, `down · (silu(gate · x) * (up · x)) * scale`, over `rows` rows of x[*, hidden] that `tokens` names.
// `up` is [2 * inner, hidden], gate first; `down` is [hidden, inner]; both widths are even. Added to the same rows of
// out[*, hidden] where `add`, else written to its first `rows` rows.
void greenroom_expert(const void *up, const void *down, int64_t hidden, int64_t inner, const void *x,
                      const int64_t *tokens, const float *scales, int64_t rows, void *out, int add, unsigned threads) {
  thread_local Scratch scratch, inner_scratch;
  Split split = scratch.split(rows, hidden), between = inner_scratch.split(rows, inner);
  fill(split, (const uint16_t *)x, tokens, rows);
  Expert expert{(const uint32_t *)up, (const uint32_t *)down, (size_t)inner,    (size_t)hidden, (size_t)rows,
                add ? tokens : nullptr, scales,               (uint16_t *)out, add != 0};
  spread(inner, 8, threads, [&](size_t begin, size_t end) { kernels.hidden(expert, split, between, rows, begin, end); });
  spread(hidden, 4, threads, [&](size_t begin, size_t end) { kernels.output(expert, between, begin, end); });
}
}
