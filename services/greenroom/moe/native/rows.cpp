// A few rows through bf16 weights at the speed of memory, and a gated expert as one call. Plain C interface, for ctypes.
//
// Threads are those of the OpenMP runtime that torch computes with, handed in as two function pointers: a pool of our
// own would share the cores with that one's spinning threads.

#include <cmath>
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
  const uint16_t *bias;  // null: none
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

struct Norm {
  const uint16_t *x, *weight;
  uint16_t *out;
  size_t width;
  float epsilon;
};

// A tensor [rows, heads, dim] whose last axis is contiguous; strides in elements.
struct Heads {
  const uint16_t *first;
  int64_t row_stride, head_stride;
  const uint16_t *at(size_t row, size_t head) const { return first + row * row_stride + head * head_stride; }
};

// One row of a step and its sequence's memory, [heads, capacity, dim] each, of which `length` rows are written.
struct AttentionRow {
  int64_t row, keys, values, capacity, length, first;
};

struct Attention {
  Heads queries, new_keys, new_values;
  const AttentionRow *rows;
  uint16_t *out;  // [rows of the step, query heads, value_dim]
  size_t key_heads, group, key_dim, value_dim;
  float scale;
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
#define LANES_ARE_16 1
#include "rows_kernel.inc"
#undef LANES_ARE_16
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
  void (*norm)(const Norm &, size_t begin, size_t end);
  void (*attention)(const Attention &, size_t begin, size_t end);
  int lanes;
};

#define KERNELS(of) \
  { #of, of::hidden_part, of::output_part, of::linear_part, of::norm_part, of::attention_part, of::LANES }

Kernels choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return KERNELS(avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return KERNELS(avx2);
  return {};
#else
  return KERNELS(plain);
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

// Whether the processor multiplies bf16 itself; then torch's products of many rows are several times faster than these.
int greenroom_multiplies_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return 0;
#endif
}

void greenroom_use_threads(void *parallel, void *number) {
  gomp_parallel = (ParallelFn)parallel;
  thread_number = (ThreadNumberFn)number;
}

// out[rows, outputs] = x[rows, inputs] · weights[outputs, inputs]^T + bias[outputs], all bf16, sums in fp32. `inputs` is
// even; no bias is a null pointer.
void greenroom_linear(const void *weights, const void *bias, const void *x, void *out, int64_t rows, int64_t inputs, int64_t outputs,
                      unsigned threads) {
  thread_local Scratch scratch;
  Split split = scratch.split(rows, inputs);
  fill(split, (const uint16_t *)x, nullptr, rows);
  Linear job{(const uint32_t *)weights, (const uint16_t *)bias, (size_t)outputs, (size_t)rows, (uint16_t *)out};
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

// Root-mean-square norm of x[rows, width] with a weight of its own, all bf16, computed in fp32.
void greenroom_rms_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t width, float epsilon) {
  Norm job{(const uint16_t *)x, (const uint16_t *)weight, (uint16_t *)out, (size_t)width, epsilon};
  kernels.norm(job, 0, rows);
}

// Rotary position embedding in place on x[rows, heads, dim] by cos, sin[rows, dim], all bf16: the two halves of a head
// rotate against each other, and every step is rounded as bf16 tensors are.
void greenroom_rotary(void *x, const void *cosines, const void *sines, int64_t rows, int64_t heads, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t r = 0; r < rows; r++) {
    const uint16_t *cosine = (const uint16_t *)cosines + r * dim, *sine = (const uint16_t *)sines + r * dim;
    for (int64_t h = 0; h < heads; h++) {
      uint16_t *head = (uint16_t *)x + (r * heads + h) * dim;
      auto rotated = [&](float own, float other, int64_t j) {
        float along = to_float(to_bf16(own * to_float(cosine[j]))), across = to_float(to_bf16(other * to_float(sine[j])));
        return to_bf16(along + across);
      };
      for (int64_t j = 0; j < half; j++) {
        float first = to_float(head[j]), second = to_float(head[j + half]);
        head[j] = rotated(first, -second, j);
        head[j + half] = rotated(second, first, j + half);
      }
    }
  }
}

// The dimension of a head must be a multiple of this for greenroom_attention.
int greenroom_attention_granularity() { return 2 * kernels.lanes; }

// `count` rows, each over its own sequence: writes the new key and value, then out[row, head, value_dim]. The three
// tensors are given by address, row stride and head stride.
void greenroom_attention(const int64_t *queries, const int64_t *new_keys, const int64_t *new_values,
                         const void *rows, int64_t count, void *out, int64_t key_heads, int64_t group,
                         int64_t key_dim, int64_t value_dim, float scale, unsigned threads) {
  auto heads = [](const int64_t *of) { return Heads{(const uint16_t *)of[0], of[1], of[2]}; };
  Attention job{heads(queries),    heads(new_keys), heads(new_values), (const AttentionRow *)rows, (uint16_t *)out,
                (size_t)key_heads, (size_t)group,   (size_t)key_dim,   (size_t)value_dim,          scale};
  spread(count * key_heads, 1, threads, [&](size_t begin, size_t end) { kernels.attention(job, begin, end); });
}
}
