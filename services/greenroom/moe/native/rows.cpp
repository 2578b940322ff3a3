// Matrix products of a few bf16 rows at the speed of memory, gated experts (SwiGLU, and gpt-oss's) fused into one call each,
// and what a decoder layer has around them: router, RMSNorm, RoPE, attention. The interface is plain C, for ctypes.
//
// Work is spread over the threads of the OpenMP runtime that torch computes with. Its functions are handed in as
// pointers. A thread pool of our own would compete for the cores with that runtime's spinning threads.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
// Older compilers do not know the instructions.
#define HAS_AVX512BF16 (__GNUC__ >= 10 || __clang_major__ >= 9)
#elif defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)  // of which alone is asked whether a processor has FEAT_BF16
#include <sys/auxv.h>
#define HAS_NEON_BF16 (__GNUC__ >= 10 || __clang_major__ >= 16)
#endif
#endif

// In whatever product: a multiplication and a sum become one instruction, or two, alike wherever they stand.
#define INLINED static inline __attribute__((always_inline))

namespace {

typedef void (*ParallelFn)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*ThreadNumberFn)();

ParallelFn gomp_parallel = nullptr;
ThreadNumberFn thread_number = nullptr, thread_count = nullptr;

// Rows of bf16 as an instruction set multiplies them, two elements to a word, `words` in a row. Sets that multiply floats
// have a row's even elements in `even` and its odd ones in `odd`, converted. Sets that multiply bf16 have the words
// themselves in `pairs`. `stride` is `words` rounded up to whole vectors. The padding is zero.
struct Rows {
  float *even, *odd;
  uint32_t *pairs;
  size_t words, stride;
  Rows from(size_t row) const {
    const size_t at = row * stride;
    return pairs ? Rows{nullptr, nullptr, pairs + at, words, stride} : Rows{even + at, odd + at, nullptr, words, stride};
  }
};

// A matrix in codes whose neighbours share scales: grouped_products.inc. `units` of a panel, and of a group. `order`: which input
// of the model's each of its own is; null: they are the same. Products are given rows in its order.
struct CodedMatrix {
  const uint8_t *codes, *scales, *minimums;
  size_t units, group;
  const int32_t *order;
};

struct GroupedKernels;

// A linear layer over rows. Its weights are numbers, or `codes` of the format that `grouped` computes.
struct Linear {
  const uint32_t *weights;
  const uint16_t *bias;  // null: no bias
  size_t outputs, rows;
  uint16_t *out;
  const GroupedKernels *grouped = nullptr;
  CodedMatrix codes{};
};

// One expert and the rows that are routed to it. `up` holds the gate projection, then the up projection. What follows `add` is
// of experts with a clamped gate, whose `up` holds both in turns. With scales, `up` and `down` are codes: in MXFP4, or lossless ones
// with their exponents.
struct Expert {
  const uint32_t *up, *down;
  size_t inner, hidden, rows;
  const int64_t *tokens;  // the row of `out` that each row goes to; null: row r goes to row r
  const float *scales;    // the routing weight of each row
  uint16_t *out;
  bool add;
  const uint16_t *up_bias = nullptr, *down_bias = nullptr;
  float alpha = 0, limit = 0;
  const uint8_t *up_scales = nullptr, *down_scales = nullptr;
  CodedMatrix up_codes{}, down_codes{};
};

// The products of SwiGLU experts and of linear layers in a format of grouped_formats.inc. `inputs` of a unit; `tensors` of a
// matrix: codes, scales, and minimums if there are such.
struct GroupedKernels {
  const char *name;
  size_t inputs, tensors;
  void (*hidden)(const Expert &, const Rows &, Rows &, size_t begin, size_t end);
  void (*output)(const Expert &, const Rows &, size_t begin, size_t end);
  void (*linear)(const Linear &, const Rows &, size_t begin, size_t end);
};

#include "panels.inc"

// Of a matrix of so many outputs in codes, what threads share: an output of both halves of a panel each.
inline size_t coded_words(size_t outputs) { return panels_of(outputs, false) * HALF_PANEL; }

// A linear layer as callers have it. `format`: 0 is bf16; else one more than the number of the codes' (greenroom_grouped_format).
// `group`: how many inputs share a scale (0: all of them). Null: it has no bias, and its codes no minimums, no order.
struct LinearWeights {
  const void *weights, *scales, *minimums, *order, *bias;
  int64_t outputs, format, group;
};

// A matrix of lossless codes (lossless_products.inc) or planes (lossless_planes.inc), and where its bf16 numbers go to.
struct LosslessNumbers {
  const uint8_t *codes, *exponents;
  size_t outputs, inputs;
  bool joined;
  uint8_t *into;
};

// Of one of the two. `neurons` and `columns`: grains of a thread's share.
struct LosslessKernels {
  void (*hidden)(const Expert &, const Rows &, Rows &, size_t begin, size_t end);
  void (*output)(const Expert &, const Rows &, size_t begin, size_t end);
  void (*numbers)(const LosslessNumbers &, size_t begin, size_t end);
  size_t neurons, columns;
};

// Rows and weights of floats, products of floats.
struct LinearFloats {
  const float *weights, *x;
  float *out;
  size_t inputs, outputs, rows;
};

struct Norm {
  const uint16_t *x, *weight;
  uint16_t *out;
  size_t width;
  float epsilon;
};

// A tensor [rows, heads, dim] whose last axis is contiguous. Strides are in elements.
struct Heads {
  const uint16_t *first;
  int64_t row_stride, head_stride;
  const uint16_t *at(size_t row, size_t head) const { return first + row * row_stride + head * head_stride; }
};

// One row of a step, and its sequence's KV cache: `keys` and `values` are addresses of [key heads, capacity, dim] each.
// The cache holds `length` positions before this row. The row attends to those from `first` on, and to itself.
struct AttentionRow {
  int64_t row, keys, values, capacity, length, first;
};

// `tiles`: the first row of each tile, and the end of the last one.
struct Attention {
  Heads queries, new_keys, new_values;
  const AttentionRow *rows;
  const size_t *tiles;
  const uint16_t *sinks;  // [query heads]: see softmax; or null
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

#include "lossless_encoding.inc"
#include "byte_transpose.inc"
#include "bit_panels.inc"

constexpr size_t PADDING = 16, ROWS_WORTH_A_THREAD = 8, ROWS_TOGETHER = 32;

// Of an attention's tile: so many queries, and so many scores, which are to stay in the second level of cache.
constexpr size_t QUERIES_TOGETHER = 32, SCORES_TOGETHER = 1 << 18;

#if defined(__x86_64__)
#if defined(__clang__)
#define BEGIN_AVX512 _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw\"))), apply_to=function)")
#define BEGIN_AVX512BF16 \
  _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512vl,avx512bf16\"))), apply_to=function)")
#define BEGIN_AVX512BF16_VBMI2 \
  _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi2,popcnt\"))), apply_to=function)")
#define BEGIN_AVX2 _Pragma("clang attribute push(__attribute__((target(\"avx2,fma,f16c\"))), apply_to=function)")
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_AVX512 _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512bw,prefer-vector-width=512\")")
#define BEGIN_AVX512BF16 \
  _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512bw,avx512vl,avx512bf16,prefer-vector-width=512\")")
#define BEGIN_AVX512BF16_VBMI2 \
  _Pragma("GCC push_options") \
  _Pragma("GCC target(\"avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi2,popcnt,prefer-vector-width=512\")")
#define BEGIN_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma,f16c\")")
#define END_TARGET _Pragma("GCC pop_options")
#endif

#define LANES_ARE_16 1
#if HAS_AVX512BF16
BEGIN_AVX512BF16
namespace avx512bf16 {
constexpr int LANES = 16;
constexpr bool PAIRS = true;
#define MULTIPLIES_PAIRS 1
#include "rows_kernel.inc"
}
END_TARGET

BEGIN_AVX512BF16_VBMI2
namespace avx512bf16::expanding {
#define EXPANDS_BYTES 1
#include "lossless_planes.inc"
#undef EXPANDS_BYTES
}
END_TARGET
#undef MULTIPLIES_PAIRS
#endif

BEGIN_AVX512
namespace avx512 {
constexpr int LANES = 16, TILE_WEIGHTS = 4, TILE_ROWS = 4;
constexpr bool PAIRS = false;
#include "rows_kernel.inc"
}
END_TARGET
#undef LANES_ARE_16

BEGIN_AVX2
namespace avx2 {
constexpr int LANES = 8, TILE_WEIGHTS = 2, TILE_ROWS = 4;
constexpr bool PAIRS = false;
#define LANES_ARE_8 1
#include "rows_kernel.inc"
#undef LANES_ARE_8
}
END_TARGET

#elif defined(__aarch64__)
#if HAS_NEON_BF16
#if defined(__clang__)
#define BEGIN_BF16 _Pragma("clang attribute push(__attribute__((target(\"bf16\"))), apply_to=function)")
#define END_TARGET _Pragma("clang attribute pop")
#else
#define BEGIN_BF16 _Pragma("GCC push_options") _Pragma("GCC target(\"arch=armv8.2-a+bf16\")")
#define END_TARGET _Pragma("GCC pop_options")
#endif
BEGIN_BF16
namespace neonbf16 {
constexpr int LANES = 4;
constexpr bool PAIRS = true;
#define MULTIPLIES_PAIRS 1
#define MULTIPLIES_MATRICES 1
#include "rows_kernel.inc"
#undef MULTIPLIES_MATRICES
#undef MULTIPLIES_PAIRS
}
END_TARGET
#endif

// Every processor of the architecture has it.
namespace neon {
constexpr int LANES = 4, TILE_WEIGHTS = 4, TILE_ROWS = 4;
constexpr bool PAIRS = false;
#include "rows_kernel.inc"
}
#endif

#if !defined(__aarch64__)
namespace plain {
constexpr int LANES = 4, TILE_WEIGHTS = 4, TILE_ROWS = 4;
constexpr bool PAIRS = false;
#include "rows_kernel.inc"
}
#endif

struct Kernels {
  const char *name;
  void (*hidden)(const Expert &, const Rows &, Rows &, size_t begin, size_t end);
  void (*output)(const Expert &, const Rows &, size_t begin, size_t end);
  void (*clamped_hidden)(const Expert &, const Rows &, Rows &, size_t begin, size_t end);
  void (*clamped_output)(const Expert &, const Rows &, size_t begin, size_t end);
  void (*mxfp4_hidden)(const Expert &, const Rows &, Rows &, size_t begin, size_t end);
  void (*mxfp4_output)(const Expert &, const Rows &, size_t begin, size_t end);
  const GroupedKernels *grouped;  // without a name behind the last one
  LosslessKernels lossless[2];  // of codes, of planes
  void (*linear)(const Linear &, const Rows &, size_t begin, size_t end);
  void (*linear_floats)(const LinearFloats &, size_t begin, size_t end);
  void (*norm)(const Norm &, size_t begin, size_t end);
  void (*attention)(const Attention &, size_t begin, size_t end);
  int lanes;
  bool pairs;               // it multiplies bf16
  size_t columns, neurons;  // grains of a thread's share, so that threads get whole tiles
  bool for_planes = false;  // they are faster than codes
};

#define CODES(of) \
  { of::lossless_hidden_part, of::lossless_output_part, of::lossless_numbers_part, of::NEURON_GRAIN, of::COLUMN_GRAIN }
#define PLANES(of) { of::planes_hidden_part, of::planes_output_part, of::planes_numbers_part, HALF_PANEL, 2 * HALF_PANEL }

#define KERNELS(of) \
  { #of, of::hidden_part, of::output_part, of::clamped_hidden_part, of::clamped_output_part, of::mxfp4_hidden_part, \
    of::mxfp4_output_part, of::GROUPED, {CODES(of), PLANES(of)}, of::linear_part, of::linear_floats_part, of::norm_part, \
    of::attention_part, of::LANES, of::PAIRS, of::COLUMN_GRAIN, of::NEURON_GRAIN }

// Whether the processor multiplies bf16 itself.
bool multiplies_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long FEAT_BF16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
  return (getauxval(AT_HWCAP2) & FEAT_BF16) != 0;
#else
  return false;
#endif
}

bool announces_tiles() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1u << 24);
#else
  return false;
#endif
}

bool tiles_have_shape() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __get_cpuid_count(0x1D, 1, &a, &b, &c, &d) && b;  // b: bytes of a tile's row, and number of tiles
#else
  return false;
#endif
}

#if defined(__x86_64__)
// Whether the processor has F16C, which older compilers can not ask for. All that have AVX2 do.
bool converts_halfs() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// The instruction sets that this processor can run, the fastest first. On x86 without AVX2 there is none: torch is
// faster there than `plain`.
std::vector<Kernels> available() {
  std::vector<Kernels> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
#if HAS_AVX512BF16
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    found.push_back(KERNELS(avx512bf16));
    if (__builtin_cpu_supports("avx512vbmi2")) {
      found.back().lossless[1] = PLANES(avx512bf16::expanding);
      found.back().for_planes = true;
    }
  }
#endif
  // Only Knights Landing and its like have the one without the other.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) found.push_back(KERNELS(avx512));
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_halfs()) found.push_back(KERNELS(avx2));
  if (!found.empty()) found.push_back(KERNELS(plain));
#elif defined(__aarch64__)
#if HAS_NEON_BF16
  if (multiplies_bf16()) found.push_back(KERNELS(neonbf16));
#endif
  found.push_back(KERNELS(neon));
#else
  found.push_back(KERNELS(plain));
#endif
  return found;
}

const std::vector<Kernels> choices = available();
Kernels kernels = choices.empty() ? Kernels{} : choices.front();

// This thread's memory for some Rows. It is kept for the next call.
struct Scratch {
  std::vector<float> numbers;
  Rows rows(size_t rows, size_t elements) {
    const size_t words = elements / 2, stride = (words + PADDING - 1) / PADDING * PADDING | (kernels.pairs ? PADDING : 0);
    const size_t planes = kernels.pairs ? 1 : 2;
    if (numbers.size() < planes * rows * stride + PADDING) numbers.resize(planes * rows * stride + PADDING);
    float *first = (float *)(((uintptr_t)numbers.data() + 63) / 64 * 64);
    Rows found = kernels.pairs ? Rows{nullptr, nullptr, (uint32_t *)first, words, stride}
                               : Rows{first, first + rows * stride, nullptr, words, stride};
    for (size_t r = 0; words < stride && r < planes * rows; r++) memset(first + r * stride + words, 0, (stride - words) * 4);
    return found;
  }
};

// The `count` rows of bf16 that `tokens` name, or the first ones, with their elements in an `order` (null: in their own).
void fill(const Rows &into, const uint16_t *rows, const int64_t *tokens, size_t count, const int32_t *order = nullptr) {
  for (size_t r = 0; r < count; r++) {
    const uint16_t *row = rows + (tokens ? tokens[r] : (int64_t)r) * 2 * into.words;
    if (order) {
      const Rows own = into.from(r);
      for (size_t j = 0; j < into.words; j++) {
        const uint16_t first = row[order[2 * j]], second = row[order[2 * j + 1]];
        if (own.pairs) {
          own.pairs[j] = first | (uint32_t)second << 16;
        } else {
          own.even[j] = to_float(first);
          own.odd[j] = to_float(second);
        }
      }
      continue;
    }
    if (into.pairs) {
      memcpy(into.pairs + r * into.stride, row, into.words * 4);
      continue;
    }
    float *even = into.even + r * into.stride, *odd = into.odd + r * into.stride;
    for (size_t j = 0; j < into.words; j++) {
      even[j] = to_float(row[2 * j]);
      odd[j] = to_float(row[2 * j + 1]);
    }
  }
}

// Puts the elements of rows [begin, end) into an order, where they are.
void reorder(const Rows &of, const int32_t *order, size_t begin, size_t end) {
  std::vector<float> numbers;
  std::vector<uint16_t> bits;
  for (size_t r = begin; r < end; r++) {
    const Rows own = of.from(r);
    if (own.pairs) {
      bits.assign((const uint16_t *)own.pairs, (const uint16_t *)own.pairs + 2 * of.words);
      fill(own, bits.data(), nullptr, 1, order);
      continue;
    }
    numbers.resize(2 * of.words);
    for (size_t j = 0; j < of.words; j++) {
      numbers[2 * j] = own.even[j];
      numbers[2 * j + 1] = own.odd[j];
    }
    for (size_t j = 0; j < of.words; j++) {
      own.even[j] = numbers[order[2 * j]];
      own.odd[j] = numbers[order[2 * j + 1]];
    }
  }
}

// Calls `work(me, of)` on each of `of` threads: a parallel region.
template <class Work>
void together(unsigned threads, Work work) {
  if (threads <= 1 || !gomp_parallel) {
    work(0, 1);
    return;
  }
  gomp_parallel([](void *data) { (*(Work *)data)(thread_number(), thread_count()); }, &work, threads, 0);
}

// Calls `part` with the share of [0, count) that falls to thread `me` of `of`. Shares are cut at multiples of `grain`.
template <class Part>
void share(size_t count, size_t grain, size_t me, size_t of, Part part) {
  size_t blocks = (count + grain - 1) / grain;
  size_t begin = blocks * me / of * grain, end = blocks * (me + 1) / of * grain;
  if (end > count) end = count;
  if (begin < end) part(begin, end);
}

// Runs `part(begin, end)` over [0, count) in as many parts as there are threads.
template <class Part>
void spread(size_t count, size_t grain, unsigned threads, Part part) {
  if (count <= grain) return part(0, count);
  together(threads, [&](size_t me, size_t of) { share(count, grain, me, of, part); });
}

void norm_rows(const void *x, const void *weight, void *out, size_t rows, size_t width, float epsilon, unsigned threads) {
  Norm job{(const uint16_t *)x, (const uint16_t *)weight, (uint16_t *)out, width, epsilon};
  spread(rows, ROWS_WORTH_A_THREAD, threads, [&](size_t begin, size_t end) { kernels.norm(job, begin, end); });
}

// RoPE of rows [begin, end) of x[rows, heads, dim], in place.
void rotate_rows(uint16_t *x, const uint16_t *cosines, const uint16_t *sines, size_t begin, size_t end, size_t heads,
                 size_t dim) {
  const size_t half = dim / 2;
  for (size_t r = begin; r < end; r++) {
    const uint16_t *cosine = cosines + r * dim, *sine = sines + r * dim;
    for (size_t h = 0; h < heads; h++) {
      uint16_t *head = x + (r * heads + h) * dim;
      auto rotated = [&](float own, float other, size_t j) {
        float along = to_float(to_bf16(own * to_float(cosine[j]))), across = to_float(to_bf16(other * to_float(sine[j])));
        return to_bf16(along + across);
      };
      for (size_t j = 0; j < half; j++) {
        float first = to_float(head[j]), second = to_float(head[j + half]);
        head[j] = rotated(first, -second, j);
        head[j + half] = rotated(second, first, j + half);
      }
    }
  }
}

// The rows of some experts. Expert e has rows [starts[e], starts[e + 1]): see greenroom_experts.
struct Routed {
  const int64_t *starts, *tokens;
  size_t count, hidden, inner;
  const float *scales;
  const uint16_t *x;
  uint16_t *out;
  bool add;
};

// Experts over their rows. Threads share the inner neurons in multiples of `inner_grain` for `hidden_part`, then [0, outputs)
// in multiples of `output_grain` for `output_part`. `weights_of(expert, e)` sets the weights of expert e.
template <class WeightsOf>
void run_experts(const Routed &of, unsigned threads, decltype(Kernels::hidden) hidden_part, size_t inner_grain,
                 decltype(Kernels::output) output_part, size_t outputs, size_t output_grain, WeightsOf weights_of) {
  thread_local Scratch scratch, inner_scratch;
  std::vector<Expert> experts;  // not thread_local: in the lambdas below every thread would see a vector of its own
  const int64_t *starts = of.starts;
  for (size_t first = 0, last; first < of.count; first = last) {
    // As many experts at once as still keep the activations between up and down projection in the processor's cache.
    for (last = first + 1; last < of.count && starts[last + 1] - starts[first] <= (int64_t)ROWS_TOGETHER; last++) {
    }
    const int64_t begin_row = starts[first], rows = starts[last] - begin_row;
    Rows split = scratch.rows(rows, of.hidden), between = inner_scratch.rows(rows, of.inner);
    experts.clear();
    for (size_t e = first; e < last; e++) {
      experts.push_back({nullptr, nullptr, of.inner, of.hidden, (size_t)(starts[e + 1] - starts[e]),
                         of.add ? of.tokens + starts[e] : nullptr, of.scales + starts[e],
                         of.out + (of.add ? 0 : starts[e] * of.hidden), of.add});
      weights_of(experts.back(), e);
      fill(split.from(starts[e] - begin_row), of.x, of.tokens + starts[e], experts.back().rows, experts.back().up_codes.order);
    }
    // Every thread takes its share of every expert. So uneven numbers of rows leave no thread idle.
    together(threads, [&](size_t me, size_t all) {
      size_t row = 0;
      for (const Expert &expert : experts) {
        Rows own = split.from(row), into = between.from(row);
        share(of.inner, inner_grain, me, all, [&](size_t begin, size_t end) { hidden_part(expert, own, into, begin, end); });
        row += expert.rows;
      }
    });
    if (experts.front().down_codes.order)
      together(threads, [&](size_t me, size_t all) {
        size_t row = 0;
        for (const Expert &expert : experts) {
          Rows own = between.from(row);
          share(expert.rows, 1, me, all, [&](size_t begin, size_t end) { reorder(own, expert.down_codes.order, begin, end); });
          row += expert.rows;
        }
      });
    together(threads, [&](size_t me, size_t all) {
      size_t row = 0;
      for (const Expert &expert : experts) {
        Rows own = between.from(row);
        share(outputs, output_grain, me, all, [&](size_t begin, size_t end) { output_part(expert, own, begin, end); });
        row += expert.rows;
      }
    });
  }
}

// The weights of one decoder layer's attention block, and of the norms before (`before`) and after it (`after`). The
// norms of queries and keys may be missing: they are null then.
struct AttentionWeights {
  LinearWeights query, key, value, output;
  const void *before, *query_norm, *key_norm, *after;
  int64_t hidden, dim, query_norm_width, key_norm_width;
  float before_epsilon, query_epsilon, key_epsilon, after_epsilon;
};

#if defined(__aarch64__) && defined(__GNUC__) && !defined(__clang__)
// GCC 12 for ARM fails in vectorising the loop that looks for the largest logit.
#define NOT_VECTORISED __attribute__((optimize("no-tree-vectorize")))
#else
#define NOT_VECTORISED
#endif

// Top-k routing: from each row's router logits its `k` picks and their routing weights. greenroom_route and
// greenroom_route_confined say the rules.
NOT_VECTORISED
void pick_rows(const uint16_t *logits, size_t begin, size_t end, int64_t experts, int64_t k, bool normalise, bool rounded,
               const uint8_t *allowed, int64_t stride, uint8_t *rerouted, int64_t *picks, float *scales) {
  std::vector<float> shares(experts);
  for (size_t r = begin; r < end; r++) {
    const uint16_t *logit = logits + r * experts;
    const uint8_t *may = allowed ? allowed + r * stride : nullptr;
    float most = -INFINITY, sum = 0, picked = 0, least = 0;
    int64_t last = 0;
    for (int64_t e = 0; e < experts; e++)
      if (!may || may[e]) most = std::fmax(most, to_float(logit[e]));
    for (int64_t e = 0; e < experts; e++) {
      shares[e] = std::exp(to_float(logit[e]) - most);
      if (!may || may[e]) sum += shares[e];
    }
    for (int64_t n = 0; n < k; n++) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; e++)
        if ((!may || may[e]) && (best < 0 || !(shares[e] <= shares[best]))) best = e;
      picks[r * k + n] = last = best;
      least = shares[best];
      picked += scales[r * k + n] = least / sum;
      shares[best] = -1;
    }
    for (int64_t n = 0; n < k; n++) {
      float &scale = scales[r * k + n];
      if (normalise) scale /= picked;
      if (rounded) scale = to_float(to_bf16(scale));
    }
    if (may) {
      rerouted[r] = 0;
      for (int64_t e = 0; e < experts; e++)
        if (!may[e] && (shares[e] > least || (shares[e] == least && e < last))) rerouted[r] = 1;
    }
  }
}

// The first row of each tile of `count` rows, and the end of the last one. A tile is neighbouring rows of one sequence.
std::vector<size_t> tiles_of(const AttentionRow *rows, size_t count, size_t group) {
  std::vector<size_t> firsts{0};
  for (size_t n = 1; n < count; n++) {
    const AttentionRow &row = rows[n], &before = rows[n - 1];
    const bool next = row.keys == before.keys && row.row == before.row + 1 && row.length == before.length + 1 &&
                      (row.first == before.first || row.first == before.first + 1);
    const size_t scores = (row.length + 1 - rows[firsts.back()].first) * group, together = n - firsts.back() + 1;
    if (!next || together * group > QUERIES_TOGETHER || together * scores > SCORES_TOGETHER) firsts.push_back(n);
  }
  firsts.push_back(count);
  return firsts;
}

// Experts with a clamped gate. `weights` has the addresses of `tensors` of each: of both projections the numbers, behind
// them scales where there are six, and the bias.
void run_clamped(const Routed &routed, const int64_t *weights, size_t tensors, decltype(Kernels::clamped_hidden) hidden_part,
                 decltype(Kernels::clamped_output) output_part, float alpha, float limit, unsigned threads) {
  const size_t lanes = kernels.lanes, half = tensors / 2;
  run_experts(routed, threads, hidden_part, lanes, output_part, routed.hidden / 2, lanes, [&](Expert &expert, size_t e) {
    const int64_t *up = weights + tensors * e, *down = up + half;
    expert.up = (const uint32_t *)up[0];
    expert.down = (const uint32_t *)down[0];
    if (half == 3) {
      expert.up_scales = (const uint8_t *)up[1];
      expert.down_scales = (const uint8_t *)down[1];
    }
    expert.up_bias = (const uint16_t *)up[half - 1];
    expert.down_bias = (const uint16_t *)down[half - 1];
    expert.alpha = alpha;
    expert.limit = limit;
  });
}

// The tensors of a matrix in codes that a record has. `format`: its number, how many inputs share a scale (0: all of them), and
// whether the last tensor is the order of its inputs.
size_t tensors_of(const int64_t *format) { return kernels.grouped[format[0]].tensors + (format[2] != 0); }

// `group`: how many inputs share a scale (0: all of them).
CodedMatrix coded_matrix(const GroupedKernels &of, size_t inputs, size_t group, const void *codes, const void *scales,
                         const void *minimums, const void *order) {
  const size_t units = (inputs + of.inputs - 1) / of.inputs;
  return {(const uint8_t *)codes, (const uint8_t *)scales, (const uint8_t *)minimums, units, group ? group / of.inputs : units,
          (const int32_t *)order};
}

// SwiGLU experts in codes. `formats`: that of the first projection, then that of the second one: tensors_of. `weights` has the
// addresses of each expert's tensors.
void run_grouped(const Routed &routed, const int64_t *formats, const int64_t *weights, unsigned threads) {
  const GroupedKernels &up = kernels.grouped[formats[0]], &down = kernels.grouped[formats[3]];
  const size_t up_tensors = tensors_of(formats), tensors = up_tensors + tensors_of(formats + 3);
  auto matrix = [](const GroupedKernels &of, const int64_t *format, size_t inputs, const int64_t *at) {
    return coded_matrix(of, inputs, format[1], (const void *)at[0], (const void *)at[1],
                        (const void *)(of.tensors > 2 ? at[2] : 0), (const void *)(format[2] ? at[of.tensors] : 0));
  };
  const size_t words = coded_words(routed.hidden);
  run_experts(routed, threads, up.hidden, HALF_PANEL, down.output, words, HALF_PANEL, [&](Expert &expert, size_t e) {
    const int64_t *own = weights + tensors * e;
    expert.up_codes = matrix(up, formats, routed.hidden, own);
    expert.down_codes = matrix(down, formats + 3, routed.inner, own + up_tensors);
  });
}

Linear linear_of(const LinearWeights &of, int64_t inputs, int64_t rows, void *out) {
  Linear job{(const uint32_t *)of.weights, (const uint16_t *)of.bias, (size_t)of.outputs, (size_t)rows, (uint16_t *)out};
  if (of.format) {
    job.grouped = &kernels.grouped[of.format - 1];
    job.codes = coded_matrix(*job.grouped, inputs, of.group, of.weights, of.scales, of.minimums, of.order);
  }
  return job;
}

// The share of a linear layer's outputs that falls to thread `me` of `of`. Then `done(begin, end)` is called with these outputs.
template <class Done>
void share_linear(const Linear &job, const Rows &x, size_t me, size_t of, Done done) {
  if (!job.grouped)
    return share(job.outputs, kernels.columns, me, of, [&](size_t begin, size_t end) {
      kernels.linear(job, x, begin, end);
      done(begin, end);
    });
  share(coded_words(job.outputs), HALF_PANEL, me, of, [&](size_t begin, size_t end) {
    job.grouped->linear(job, x, begin, end);
    done(2 * begin, std::min(2 * end, job.outputs));  // whole panels
  });
}

// As greenroom_all_experts says, of experts that have `tensors` addresses in `weights` each. They are computed by
// `compute(weights, starts, count, tokens, scales, out)`, which adds to its rows.
template <class Compute>
int64_t run_all(const int64_t *weights, size_t tensors, int64_t count, const int64_t *picks, const float *scales, int64_t rows,
                int64_t k, int64_t hidden, void *stream, Compute compute) {
  std::vector<int64_t> starts(count + 1), tokens(rows * k), used, bounds{0};
  std::vector<float> factors(rows * k);
  for (int64_t n = 0; n < rows * k; n++) starts[picks[n] + 1]++;
  for (int64_t e = 0; e < count; e++) {
    if (starts[e + 1]) {
      used.insert(used.end(), weights + tensors * e, weights + tensors * (e + 1));
      bounds.push_back(bounds.back() + starts[e + 1]);
    }
    starts[e + 1] += starts[e];
  }
  for (int64_t n = 0; n < rows * k; n++) {
    int64_t at = starts[picks[n]]++;
    tokens[at] = n / k;
    factors[at] = scales[n];
  }
  std::vector<uint16_t> sum(rows * hidden);
  const int64_t busy = bounds.size() - 1;
  compute(used.data(), bounds.data(), busy, tokens.data(), factors.data(), sum.data());
  uint16_t *into = (uint16_t *)stream;
  for (int64_t n = 0; n < rows * hidden; n++) into[n] = to_bf16(to_float(into[n]) + to_float(sum[n]));
  return busy;
}

}  // namespace

extern "C" {

// The instruction sets to choose from, the fastest first. Null behind the last.
const char *greenroom_instruction_set(int64_t number) {
  return number < (int64_t)choices.size() ? choices[number].name : nullptr;
}

// Compute with this instruction set from now on. Not to be called while anything is computed.
void greenroom_use_instruction_set(int64_t number) { kernels = choices[number]; }

// Whether the processor multiplies bf16 itself. torch's products of many rows are then several times faster than these.
int greenroom_multiplies_bf16() { return multiplies_bf16(); }

// Whether the processor announces AMX tiles (CPUID leaf 7) and does not say what shape they have (leaf 0x1D). Some
// virtual machines do so. Code that is generated for such tiles holds instructions that do not exist.
int greenroom_tiles_lack_shape() { return announces_tiles() && !tiles_have_shape(); }

// Whether the processor has AMX tiles, by which torch multiplies many rows of bf16.
int greenroom_has_tiles() { return announces_tiles() && tiles_have_shape(); }

void greenroom_use_threads(void *parallel, void *number, void *count) {
  gomp_parallel = (ParallelFn)parallel;
  thread_number = (ThreadNumberFn)number;
  thread_count = (ThreadNumberFn)count;
}

// A linear layer: out[rows, outputs] = x[rows, inputs] · weights[outputs, inputs]^T + bias[outputs]. All are bf16, sums
// are fp32. `inputs` is even. `bias` may be null.
void greenroom_linear(const void *weights, const void *bias, const void *x, void *out, int64_t rows, int64_t inputs, int64_t outputs,
                      unsigned threads) {
  thread_local Scratch scratch;
  Rows split = scratch.rows(rows, inputs);
  fill(split, (const uint16_t *)x, nullptr, rows);
  Linear job{(const uint32_t *)weights, (const uint16_t *)bias, (size_t)outputs, (size_t)rows, (uint16_t *)out};
  spread(outputs, kernels.columns, threads, [&](size_t begin, size_t end) { kernels.linear(job, split, begin, end); });
}

// As greenroom_linear, of weights in bf16 or in codes.
void greenroom_linear_layer(const LinearWeights *of, const void *x, void *out, int64_t rows, int64_t inputs, unsigned threads) {
  thread_local Scratch scratch;
  Rows split = scratch.rows(rows, inputs);
  const Linear job = linear_of(*of, inputs, rows, out);
  fill(split, (const uint16_t *)x, nullptr, rows, job.codes.order);
  together(threads, [&](size_t me, size_t threads) { share_linear(job, split, me, threads, [](size_t, size_t) {}); });
}

// Gated experts over their rows: `down · (silu(gate · x) * (up · x)) * scale`.
//
// Expert e computes the rows of x[*, hidden] that tokens[starts[e]] to tokens[starts[e + 1] - 1] name. weights[2 * e] is
// the address of its gate and up projections [2 * inner, hidden], gate first. weights[2 * e + 1] is that of its down
// projection [hidden, inner]. `hidden` and `inner` are even. `scales` are the routing weights.
//
// With `add`, results are added to the same rows of out[*, hidden], in the order of the experts. Without it they are
// written to the rows of `out` one after the other.
void greenroom_experts(const int64_t *weights, const int64_t *starts, int64_t count, int64_t hidden, int64_t inner,
                       const void *x, const int64_t *tokens, const float *scales, void *out, int add, unsigned threads) {
  Routed routed{starts, tokens, (size_t)count, (size_t)hidden, (size_t)inner, scales, (const uint16_t *)x, (uint16_t *)out, add != 0};
  run_experts(routed, threads, kernels.hidden, kernels.neurons, kernels.output, hidden, kernels.columns, [&](Expert &expert, size_t e) {
    expert.up = (const uint32_t *)weights[2 * e];
    expert.down = (const uint32_t *)weights[2 * e + 1];
  });
}

// Whether greenroom_lossless_experts are faster of planes than of codes with this instruction set.
int greenroom_is_for_planes() { return kernels.for_planes; }

// As greenroom_experts, of lossless codes (kind 0: lossless_products.inc) or planes (kind 1: lossless_planes.inc), with the same
// results. weights[4 * e] and the following are the addresses of the codes and the exponents of its gate and up projections, and of
// those of its down projection.
void greenroom_lossless_experts(int64_t kind, const int64_t *weights, const int64_t *starts, int64_t count, int64_t hidden, int64_t inner,
                                const void *x, const int64_t *tokens, const float *scales, void *out, int add, unsigned threads) {
  Routed routed{starts, tokens, (size_t)count, (size_t)hidden, (size_t)inner, scales, (const uint16_t *)x, (uint16_t *)out, add != 0};
  const LosslessKernels &own = kernels.lossless[kind];
  run_experts(routed, threads, own.hidden, own.neurons, own.output, hidden, own.columns, [&](Expert &expert, size_t e) {
    expert.up = (const uint32_t *)weights[4 * e];
    expert.up_scales = (const uint8_t *)weights[4 * e + 1];
    expert.down = (const uint32_t *)weights[4 * e + 2];
    expert.down_scales = (const uint8_t *)weights[4 * e + 3];
  });
}

// Of `count` matrices in[rows, columns] of bytes out[columns, rows].
void greenroom_transpose_bytes(const void *in, int64_t count, int64_t rows, int64_t columns, void *out) {
  for (int64_t matrix = 0; matrix < count; matrix++)
    transpose_bytes((const uint8_t *)in + matrix * rows * columns, rows, columns, (uint8_t *)out + matrix * rows * columns);
}

// Codes of 1, 2 or 4 `bits`, a byte each, of a matrix [outputs, inputs], as panels. `joined`: the matrix is gates, then as many ups.
void greenroom_bit_panels(int64_t bits, int joined, const void *codes, int64_t outputs, int64_t inputs, void *out) {
  (bits == 4 ? bit_panels<4> : bits == 2 ? bit_panels<2> : bit_panels<1>)((const uint8_t *)codes, outputs, inputs, joined != 0, (uint8_t *)out);
}

// Codes of 4 or 2 `bits`, side by side in `bytes` bytes of each row, as a byte each. Rows begin `apart` bytes after each other. Of each
// `width` bytes come all lowest codes, then all next higher ones, and so on.
void greenroom_spread_codes(int64_t bits, const void *in, int64_t rows, int64_t apart, int64_t bytes, int64_t width, void *out) {
  (bits == 4 ? spread_codes<4> : spread_codes<2>)((const uint8_t *)in, rows, apart, bytes, width, (uint8_t *)out);
}

// The lossless codes or planes of a matrix numbers[outputs, inputs], bf16, and its exponents, which were zeroed and have room for so
// many weights that the table lacks. `joined`: the matrix is gates, then as many ups. Returns how many there are. If they are more,
// what was written means other numbers.
int64_t greenroom_lossless_encode(int64_t kind, int joined, const void *numbers, int64_t outputs, int64_t inputs, int64_t room, void *codes,
                                  void *exponents) {
  const uint16_t *of = (const uint16_t *)numbers;
  uint8_t *into = (uint8_t *)codes, *beside = (uint8_t *)exponents;
  return (int64_t)(kind ? encode_planes(of, outputs, inputs, joined, room, into, beside) : encode_codes(of, outputs, inputs, room, into, beside));
}

// The numbers out[outputs, inputs], bf16, of a matrix of lossless codes or planes.
void greenroom_lossless_numbers(int64_t kind, int joined, const void *codes, const void *exponents, int64_t outputs, int64_t inputs, void *out,
                                unsigned threads) {
  const LosslessNumbers job{(const uint8_t *)codes, (const uint8_t *)exponents, (size_t)outputs, (size_t)inputs, joined != 0, (uint8_t *)out};
  spread(kind ? panels_of(outputs, joined) : outputs, kind ? 1 : CODE_STRIP, threads,
         [&](size_t begin, size_t end) { kernels.lossless[kind].numbers(job, begin, end); });
}

// As greenroom_experts, of gpt-oss's: `down · ((up + 1) * gate * sigmoid(alpha * gate)) * scale`, with biases of both
// projections, gate at most `limit`, and up within ±`limit`.
//
// weights[4 * e] and the following are the addresses of its first projection [hidden, 2 * inner], whose outputs are a gate
// and an up in turns, of that one's bias, of its second projection [inner, hidden], and of that one's bias.
void greenroom_clamped_experts(const int64_t *weights, const int64_t *starts, int64_t count, int64_t hidden, int64_t inner,
                               const void *x, const int64_t *tokens, const float *scales, void *out, int add, float alpha,
                               float limit, unsigned threads) {
  Routed routed{starts, tokens, (size_t)count, (size_t)hidden, (size_t)inner, scales, (const uint16_t *)x, (uint16_t *)out, add != 0};
  run_clamped(routed, weights, 4, kernels.clamped_hidden, kernels.clamped_output, alpha, limit, threads);
}

// As greenroom_clamped_experts, of experts in MXFP4: `hidden` and `inner` are multiples of 32.
//
// weights[6 * e] and the following are the addresses of its first projection's codes, scales (mxfp4_products.inc) and bias,
// and of its second one's.
void greenroom_mxfp4_experts(const int64_t *weights, const int64_t *starts, int64_t count, int64_t hidden, int64_t inner,
                             const void *x, const int64_t *tokens, const float *scales, void *out, int add, float alpha,
                             float limit, unsigned threads) {
  Routed routed{starts, tokens, (size_t)count, (size_t)hidden, (size_t)inner, scales, (const uint16_t *)x, (uint16_t *)out, add != 0};
  run_clamped(routed, weights, 6, kernels.mxfp4_hidden, kernels.mxfp4_output, alpha, limit, threads);
}

// The formats of greenroom_grouped_experts. Null behind the last.
const char *greenroom_grouped_format(int64_t number) { return choices.empty() ? nullptr : choices.front().grouped[number].name; }

// As greenroom_experts, of experts in codes of a few bits: run_grouped. `hidden` and `inner` are even. Codes are padded to whole
// units and panels.
void greenroom_grouped_experts(const int64_t *formats, const int64_t *weights, const int64_t *starts, int64_t count, int64_t hidden,
                               int64_t inner, const void *x, const int64_t *tokens, const float *scales, void *out, int add,
                               unsigned threads) {
  Routed routed{starts, tokens, (size_t)count, (size_t)hidden, (size_t)inner, scales, (const uint16_t *)x, (uint16_t *)out, add != 0};
  run_grouped(routed, formats, weights, threads);
}

// An MoE layer all of whose experts are resident. `weights` are as above. Each row of x[rows, hidden] has `k` picks, and
// their routing weights in `scales`. The weighted sum of its experts' results is added to its row of the residual stream
// stream[rows, hidden]. Returns how many experts had any row.
int64_t greenroom_all_experts(const int64_t *weights, int64_t count, const int64_t *picks, const float *scales, int64_t rows,
                              int64_t k, int64_t hidden, int64_t inner, const void *x, void *stream, unsigned threads) {
  auto compute = [&](const int64_t *used, const int64_t *starts, int64_t busy, const int64_t *tokens, const float *factors, void *out) {
    greenroom_experts(used, starts, busy, hidden, inner, x, tokens, factors, out, 1, threads);
  };
  return run_all(weights, 2, count, picks, scales, rows, k, hidden, stream, compute);
}

// As greenroom_all_experts, with `formats` and `weights` as greenroom_grouped_experts has them.
int64_t greenroom_all_grouped_experts(const int64_t *formats, const int64_t *weights, int64_t count, const int64_t *picks,
                                      const float *scales, int64_t rows, int64_t k, int64_t hidden, int64_t inner, const void *x,
                                      void *stream, unsigned threads) {
  const size_t tensors = tensors_of(formats) + tensors_of(formats + 3);
  auto compute = [&](const int64_t *used, const int64_t *starts, int64_t busy, const int64_t *tokens, const float *factors, void *out) {
    greenroom_grouped_experts(formats, used, starts, busy, hidden, inner, x, tokens, factors, out, 1, threads);
  };
  return run_all(weights, tensors, count, picks, scales, rows, k, hidden, stream, compute);
}

// As greenroom_all_experts, with the weights of greenroom_lossless_experts.
int64_t greenroom_all_lossless_experts(int64_t kind, const int64_t *weights, int64_t count, const int64_t *picks, const float *scales,
                                       int64_t rows, int64_t k, int64_t hidden, int64_t inner, const void *x, void *stream, unsigned threads) {
  auto compute = [&](const int64_t *used, const int64_t *starts, int64_t busy, const int64_t *tokens, const float *factors, void *out) {
    greenroom_lossless_experts(kind, used, starts, busy, hidden, inner, x, tokens, factors, out, 1, threads);
  };
  return run_all(weights, 4, count, picks, scales, rows, k, hidden, stream, compute);
}

// out[tokens[r], width] += rows[r, width], all bf16, in the order of the rows.
void greenroom_add_rows(void *out, const int64_t *tokens, const void *rows, int64_t count, int64_t width) {
  for (int64_t r = 0; r < count; r++) {
    uint16_t *into = (uint16_t *)out + tokens[r] * width;
    const uint16_t *row = (const uint16_t *)rows + r * width;
    for (int64_t n = 0; n < width; n++) into[n] = to_bf16(to_float(into[n]) + to_float(row[n]));
  }
}

// A router that is one linear layer: of each row the `k` largest of softmax(weight[experts, hidden] · x).
//
// Picks are in descending order. Of equal experts the one with the lower number comes first. Logits are bf16, their
// softmax is fp32. With `normalise` the routing weights are divided by their sum over the row's picks. With `rounded`
// they are rounded to bf16.
void greenroom_route(const void *weight, const void *x, int64_t rows, int64_t hidden, int64_t experts, int64_t k,
                     int normalise, int rounded, int64_t *picks, float *scales, unsigned threads) {
  std::vector<uint16_t> logits(rows * experts);
  greenroom_linear(weight, nullptr, x, logits.data(), rows, hidden, experts, threads);
  spread(rows, ROWS_WORTH_A_THREAD, threads, [&](size_t begin, size_t end) {
    pick_rows(logits.data(), begin, end, experts, k, normalise, rounded, nullptr, 0, nullptr, picks, scales);
  });
}

// As greenroom_route, with masked routing: row r may go only to experts e with allowed[r * stride + e]. rerouted[r]: the
// router alone would have picked another expert. Returns how many rows were rerouted. Returns -1, and does nothing, if a
// row is allowed fewer than `k` experts.
int64_t greenroom_route_confined(const void *weight, const void *x, int64_t rows, int64_t hidden, int64_t experts,
                                 int64_t k, int normalise, int rounded, const uint8_t *allowed, int64_t stride,
                                 uint8_t *rerouted, int64_t *picks, float *scales, unsigned threads) {
  for (int64_t r = 0; r < (stride ? rows : 1); r++) {
    int64_t count = 0;
    for (int64_t e = 0; e < experts; e++) count += allowed[r * stride + e] != 0;
    if (count < k) return -1;
  }
  std::vector<uint16_t> logits(rows * experts);
  greenroom_linear(weight, nullptr, x, logits.data(), rows, hidden, experts, threads);
  spread(rows, ROWS_WORTH_A_THREAD, threads, [&](size_t begin, size_t end) {
    pick_rows(logits.data(), begin, end, experts, k, normalise, rounded, allowed, stride, rerouted, picks, scales);
  });
  int64_t count = 0;
  for (int64_t r = 0; r < rows; r++) count += rerouted[r];
  return count;
}

// out[rows, outputs] = x[rows, inputs] times the transposed weights[outputs, inputs], of floats.
void greenroom_linear_floats(const void *weights, const void *x, void *out, int64_t rows, int64_t inputs, int64_t outputs,
                             unsigned threads) {
  LinearFloats job{(const float *)weights, (const float *)x, (float *)out, (size_t)inputs, (size_t)outputs, (size_t)rows};
  spread(outputs, 4, threads, [&](size_t begin, size_t end) { kernels.linear_floats(job, begin, end); });
}

// RMSNorm of x[rows, width]. Rows and weight are bf16; it is computed in fp32.
void greenroom_rms_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t width, float epsilon) {
  norm_rows(x, weight, out, rows, width, epsilon, 1);
}

// RoPE, in place, of x[rows, heads, dim] by the cosines and sines [rows, dim], all bf16. The first half of a head rotates
// against its second half. Every step is rounded to bf16, as tensors of bf16 are.
void greenroom_rotary(void *x, const void *cosines, const void *sines, int64_t rows, int64_t heads, int64_t dim) {
  rotate_rows((uint16_t *)x, (const uint16_t *)cosines, (const uint16_t *)sines, 0, rows, heads, dim);
}

// From the residual stream hidden[rows, hidden] to queries, keys and values: RMSNorm, the three projections, the norms of
// queries and keys (a head at a time, or over all heads), and RoPE of both.
void greenroom_before_attention(const AttentionWeights *of, const void *hidden, int64_t rows, const void *cosines,
                                const void *sines, void *query, void *key, void *value, unsigned threads) {
  thread_local Scratch scratch;
  thread_local std::vector<uint16_t> normed;
  normed.resize(rows * of->hidden);
  norm_rows(hidden, of->before, normed.data(), rows, of->hidden, of->before_epsilon, threads);
  Rows split = scratch.rows(rows, of->hidden);
  const Linear jobs[] = {linear_of(of->query, of->hidden, rows, query), linear_of(of->key, of->hidden, rows, key),
                         linear_of(of->value, of->hidden, rows, value)};
  // Those that have the rows in one order are computed together.
  for (const Linear *first = jobs, *last; first < std::end(jobs); first = last) {
    for (last = first + 1; last < std::end(jobs) && last->codes.order == first->codes.order; last++) {
    }
    fill(split, normed.data(), nullptr, rows, first->codes.order);
    together(threads, [&](size_t me, size_t threads) {
      for (const Linear *job = first; job < last; job++) share_linear(*job, split, me, threads, [](size_t, size_t) {});
    });
  }
  const struct {
    void *x;
    const void *weight;
    int64_t norm_width, width;
    float epsilon;
  } heads[] = {{query, of->query_norm, of->query_norm_width, of->query.outputs, of->query_epsilon},
               {key, of->key_norm, of->key_norm_width, of->key.outputs, of->key_epsilon}};
  for (const auto &part : heads) {
    if (part.weight) norm_rows(part.x, part.weight, part.x, rows * (part.width / part.norm_width), part.norm_width, part.epsilon, threads);
    spread(rows, ROWS_WORTH_A_THREAD, threads, [&](size_t begin, size_t end) {
      rotate_rows((uint16_t *)part.x, (const uint16_t *)cosines, (const uint16_t *)sines, begin, end, part.width / of->dim, of->dim);
    });
  }
}

// From attention's result mixed[rows, width] back to the residual stream. The output projection is added to
// hidden[rows, hidden]. normed[rows, hidden] gets the RMSNorm of the sum, for what follows.
void greenroom_after_attention(const AttentionWeights *of, const void *mixed, int64_t width, void *hidden, void *normed,
                               int64_t rows, unsigned threads) {
  thread_local Scratch scratch;
  Rows split = scratch.rows(rows, width);
  const Linear job = linear_of(of->output, width, rows, normed);
  fill(split, (const uint16_t *)mixed, nullptr, rows, job.codes.order);
  uint16_t *stream = (uint16_t *)hidden, *added = (uint16_t *)normed;
  together(threads, [&](size_t me, size_t threads) {
    share_linear(job, split, me, threads, [&](size_t begin, size_t end) {
      for (int64_t r = 0; r < rows; r++)
        for (size_t n = r * of->hidden + begin; n < r * of->hidden + end; n++)
          stream[n] = to_bf16(to_float(stream[n]) + to_float(added[n]));
    });
  });
  norm_rows(hidden, of->after, normed, rows, of->hidden, of->after_epsilon, threads);
}

// greenroom_attention needs head dimensions that are multiples of this.
int greenroom_attention_granularity() { return 2 * kernels.lanes; }

// Causal attention of `count` rows, each over its own sequence up to itself, with `group` query heads to a key head
// (grouped-query attention). First all new keys and values are written into the KV caches, unless their addresses are
// null. Then out[row, head, value_dim] is computed. The three tensors are given as address, row stride and head stride.
// `sinks[query heads]`, bf16, have a share of the softmax and no value; null: there are none.
void greenroom_attention(const int64_t *queries, const int64_t *new_keys, const int64_t *new_values,
                         const void *rows, int64_t count, void *out, int64_t key_heads, int64_t group,
                         int64_t key_dim, int64_t value_dim, float scale, const void *sinks, unsigned threads) {
  if (count <= 0) return;
  auto heads = [](const int64_t *of) { return Heads{(const uint16_t *)of[0], of[1], of[2]}; };
  const std::vector<size_t> tiles = tiles_of((const AttentionRow *)rows, count, group);
  Attention job{heads(queries), heads(new_keys),       heads(new_values),      (const AttentionRow *)rows,
                tiles.data(),   (const uint16_t *)sinks, (uint16_t *)out,        (size_t)key_heads,
                (size_t)group,  (size_t)key_dim,         (size_t)value_dim,      scale};
  for (int64_t n = 0; job.new_keys.first && n < count; n++)
    for (int64_t head = 0; head < key_heads; head++) {
      const AttentionRow &row = job.rows[n];
      const int64_t at = head * row.capacity + row.length;
      memcpy((uint16_t *)row.keys + at * key_dim, job.new_keys.at(row.row, head), key_dim * 2);
      memcpy((uint16_t *)row.values + at * value_dim, job.new_values.at(row.row, head), value_dim * 2);
    }
  // Later tiles see more keys, so a thread takes the last one that is left.
  std::atomic<int64_t> left{(int64_t)(tiles.size() - 1) * key_heads};
  together(threads, [&](size_t, size_t) {
    for (int64_t unit; (unit = left.fetch_sub(1) - 1) >= 0;) kernels.attention(job, unit, unit + 1);
  });
}
}
