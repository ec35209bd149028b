// The op on a CPU: reads pages where they lie, in vector code, on XLA's own threads.
//
// Layouts (E is float, bfloat16, int8 or float8_e4m3fn):
//   keys    [P, K, Z/16, H, 16] of E   16 positions side by side: a panel. One load serves 16 scores, and the panel
//                                      is already what a blocked matrix product wants as its right side.
//   values  [P, K, Z, H] of E          the same for the second product
//   scales  [P, K, Z] float, of quantized pages
//
// Work is cut into items: (row, KV head, up to QUERY_ROWS / G query tokens, a range of keys). A single-token row is an
// item of G query rows; a prefill chunk is many items of QUERY_ROWS. Few long rows are cut along their keys as well and
// put together at the end. Per item, over chunks of KEY_CHUNK keys:
//
//   scores  S[X, keys] = Q[X, H] K[H, keys]        X query rows (token and query head), MR at a time
//   softmax online, float32 (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135)
//   values  A[X, H] += P[X, keys] V[keys, H]
//
// Threads claim items from one counter. The caller works too and never waits for a thread that has not begun, so a busy
// pool costs speed and cannot lock.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int MR = 6;           // query rows of a register block: 6 x 4 sums, 4 loads and 1 broadcast of 32 registers
constexpr int NUM_VECTORS = 4;  // vectors of a register block
#else
constexpr int LANES = 8;
constexpr int MR = 6;  // 6 x 2 sums, 2 loads and 1 broadcast of 16 registers
constexpr int NUM_VECTORS = 2;
#endif
constexpr int PANEL = 16;                            // positions of a panel: the layout, the same on every machine
constexpr int PANEL_VECTORS = PANEL / LANES;         // vectors across a panel
constexpr int BLOCK = NUM_VECTORS / PANEL_VECTORS;   // panels of a register block
constexpr int QUERY_ROWS = 48;                       // query rows of an item
constexpr int KEY_CHUNK = 128;                       // keys between two softmax updates: 48 x 128 scores are 24 KB
constexpr int CHUNK_PANELS = KEY_CHUNK / PANEL;
constexpr int MIN_SPLIT = 256;                       // fewest keys worth an item of their own
constexpr int FEW_ROWS = 4;                          // query rows up to which memory is slower than arithmetic
constexpr int64_t INLINE_WORK = 1 << 18;             // multiply-adds below which waking a thread costs more
constexpr float LOWEST = -1e30f;                     // finite: LOWEST - LOWEST must not be NaN

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IVec __attribute__((vector_size(LANES * 4)));

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
inline Vec splat(float x) { return x - Vec{}; }
inline Vec select(IVec mask, Vec a, Vec b) { return (Vec)((mask & (IVec)a) | (~mask & (IVec)b)); }

// exp of x <= 0 to 1e-7 of its value, 0 below -87, NaN of NaN. Cephes' expf: ln 2 in two parts, a degree-6 polynomial.
inline Vec exp_nonpositive(Vec x) {
  const IVec is_zero = x < splat(-87.25f);
  x = select(is_zero, Vec{}, x);
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vec shifted = x * 1.4426950408889634f + magic;
  const Vec n = shifted - magic;
  const Vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec y = splat(1.9875691500e-4f);
  y = y * f + 1.3981999507e-3f;
  y = y * f + 8.3334519073e-3f;
  y = y * f + 4.1665795894e-2f;
  y = y * f + 1.6666665459e-1f;
  y = y * f + 5.0000001201e-1f;
  y = y * f * f + f + 1.0f;
  const IVec exponent = (((IVec)shifted - (IVec)magic) + 127) << 23;
  return select(is_zero, Vec{}, y * (Vec)exponent);
}

// tanh to a few units in the last place. Cephes' tanhf: a polynomial near 0, (1 - e) / (1 + e) elsewhere.
inline Vec tanh_vec(Vec x) {
  const IVec sign = (IVec)x & (IVec)splat(-0.0f);
  const Vec a = (Vec)((IVec)x & ~(IVec)splat(-0.0f));
  const Vec e = exp_nonpositive(-2.0f * a);
  const Vec far = (1.0f - e) / (1.0f + e);
  const Vec z = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vec near = p * z * x + x;
  return select(a < splat(0.625f), near, (Vec)((IVec)far | sign));
}

inline float largest(Vec v) {
  float m = v[0];
  for (int i = 1; i < LANES; ++i) m = v[i] > m ? v[i] : m;
  return m;
}
inline float sum(Vec v) {
  float s = 0;
  for (int i = 0; i < LANES; ++i) s += v[i];
  return s;
}

// Stored elements to float.
struct BFloat16 {
  uint16_t bits;
};
struct Float8 {  // e4m3fn
  uint8_t bits;
};
inline float to_float(float x) { return x; }
inline float to_float(int8_t x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline float to_float(Float8 x) {
  // Exponent and mantissa moved into a float's, and the exponent's bias put right. A subnormal gets the smallest normal
  // exponent, whose leading one is then taken off: XLA's threads treat subnormal floats as zeros.
  const uint32_t magnitude = x.bits & 0x7fu, is_subnormal = magnitude < 8;
  const uint32_t bits = (magnitude << 20) + ((120 + is_subnormal) << 23);
  float y;
  std::memcpy(&y, &bits, 4);
  y -= is_subnormal ? 0x1p-6f : 0.0f;
  return x.bits & 0x80u ? -y : y;
}

template <typename E>
inline void convert(const E* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

// S[m, panel * 16 ...] = sum over h of q[m, h] * panel[h, 16], for R query rows and N panels.
// Fetches line h of each of `soon` on the way.
template <int R, int N>
inline void score_block(const float* q, const float* const* panels, const float* const* soon, int head_dim,
                        float* scores) {
  constexpr int V = N * PANEL_VECTORS;
  Vec acc[R][V] = {};
  for (int h = 0; h < head_dim; ++h) {
    Vec k[V];
    if constexpr (R <= FEW_ROWS) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) __builtin_prefetch(soon[n] + h * PANEL);
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) k[v] = load(panels[v / PANEL_VECTORS] + h * PANEL + v % PANEL_VECTORS * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < R; ++m) {
      const Vec qm = splat(q[m * head_dim + h]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[m][v] += qm * k[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(scores + m * KEY_CHUNK + v * LANES, acc[m][v]);
}

// A[m, v ...] = A[m, v ...] * keep[m] + sum over keys of P[m, key] * V[key, v ...], for R query rows and N vectors.
template <int R, int N>
inline void value_block(const float* p, const float* const* values, int num_panels, int head_dim, const float* keep,
                        float* acc_out) {
  Vec acc[R][N];
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < N; ++v) acc[m][v] = load(acc_out + m * head_dim + v * LANES) * keep[m];
  for (int b = 0; b < num_panels; ++b) {
    const float* row = values[b];
    for (int s = 0; s < PANEL; ++s, row += head_dim) {
      Vec x[N];
#pragma GCC unroll 16
      for (int v = 0; v < N; ++v) x[v] = load(row + v * LANES);
#pragma GCC unroll 16
      for (int m = 0; m < R; ++m) {
        const Vec pm = splat(p[m * KEY_CHUNK + b * PANEL + s]);
#pragma GCC unroll 16
        for (int v = 0; v < N; ++v) acc[m][v] += pm * x[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < R; ++m)
#pragma GCC unroll 16
    for (int v = 0; v < N; ++v) store(acc_out + m * head_dim + v * LANES, acc[m][v]);
}

// All panels of a chunk for R query rows.
template <int R>
void score_rows(const float* q, const float* const* panels, const float* const* soon, int num_panels, int head_dim,
                float* scores) {
  int b = 0;
  for (; b + BLOCK <= num_panels; b += BLOCK)
    score_block<R, BLOCK>(q, panels + b, soon + b, head_dim, scores + b * PANEL);
  for (; b < num_panels; ++b) score_block<R, 1>(q, panels + b, soon + b, head_dim, scores + b * PANEL);
}

// All of head_dim for R query rows.
template <int R>
void value_rows(const float* p, const float* const* values, int num_panels, int head_dim, const float* keep,
                float* acc) {
  const float* shifted[CHUNK_PANELS];
  int h = 0;
  for (; h < head_dim;) {
    for (int b = 0; b < num_panels; ++b) shifted[b] = values[b] + h;
    if (h + NUM_VECTORS * LANES <= head_dim) {
      value_block<R, NUM_VECTORS>(p, shifted, num_panels, head_dim, keep, acc + h);
      h += NUM_VECTORS * LANES;
    } else {
      value_block<R, 1>(p, shifted, num_panels, head_dim, keep, acc + h);
      h += LANES;
    }
  }
}

#define FOR_ROWS(function, rows, ...)                     \
  switch (rows) {                                         \
    case 1: function<1>(__VA_ARGS__); break;              \
    case 2: function<2>(__VA_ARGS__); break;              \
    case 3: function<3>(__VA_ARGS__); break;              \
    case 4: function<4>(__VA_ARGS__); break;              \
    case 5: function<5>(__VA_ARGS__); break;              \
    default: function<MR>(__VA_ARGS__); break;            \
  }

// What every item reads.
struct Problem {
  const float* q;          // [T, K, G, H]
  const int32_t* table;    // [B, M]
  const int32_t* context;  // [B]
  const int32_t* starts;   // [B + 1]
  const void* keys;
  const void* values;
  const float* key_scales;    // null when not quantized
  const float* value_scales;
  float* out;  // [T, K, G, H]
  int64_t table_width, num_kv, group, head_dim, page_panels;
  int64_t window;  // 0 for none
  float scale, soft_cap;  // soft_cap 0 for none
};

struct Item {
  int32_t row, kv_head, first_token, num_tokens;  // first_token counts within the row
  int32_t first_key, end_key;
  int32_t partial;  // index of its partial result, or -1 when it is the only item of its queries
};

// Partial results of queries whose keys are divided: per query row the peak, the sum and the weighted values.
struct Partials {
  std::vector<float> peak, total, acc;
};

struct Scratch {
  std::vector<float> q, scores, acc, peak, total, keep, keys, values, factors;

  void fit(int64_t rows, int64_t head_dim, bool converts) {
    grow(q, rows * head_dim);
    grow(acc, rows * head_dim);
    grow(scores, rows * KEY_CHUNK);
    grow(peak, rows);
    grow(total, rows);
    grow(keep, rows);
    if (converts) {
      grow(keys, KEY_CHUNK * head_dim);
      grow(values, KEY_CHUNK * head_dim);
    }
  }
  static void grow(std::vector<float>& v, size_t size) {
    if (v.size() < size) v.resize(size);
  }
};

// Scores of one query row to weights: masks, caps, subtracts the peak, exponentiates. Returns the factor of what came
// before.
inline float softmax_row(const Problem& a, float* scores, int num_panels, const float* const* key_scales,
                         const float* const* value_scales, int first_visible, int end_visible, float& peak,
                         float& total) {
  const int vectors = num_panels * PANEL_VECTORS;
  for (int v = 0; v < vectors; ++v) {
    Vec s = load(scores + v * LANES);
    if (key_scales != nullptr) s *= load(key_scales[v / PANEL_VECTORS] + v % PANEL_VECTORS * LANES);
    if (a.soft_cap != 0) s = a.soft_cap * tanh_vec(s / a.soft_cap);
    store(scores + v * LANES, s);
  }
  const int width = num_panels * PANEL;
  for (int i = 0; i < std::min(first_visible, width); ++i) scores[i] = LOWEST;
  for (int i = std::max(end_visible, 0); i < width; ++i) scores[i] = LOWEST;
  Vec most = splat(LOWEST);
  for (int v = 0; v < vectors; ++v) {
    const Vec s = load(scores + v * LANES);
    most = select(s > most, s, most);
  }
  const float new_peak = std::max(peak, largest(most));
  const float keep = std::exp(peak - new_peak);
  Vec sums = {};
  for (int v = 0; v < vectors; ++v) {
    Vec p = exp_nonpositive(load(scores + v * LANES) - new_peak);
    sums += p;
    if (value_scales != nullptr) p *= load(value_scales[v / PANEL_VECTORS] + v % PANEL_VECTORS * LANES);
    store(scores + v * LANES, p);
  }
  total = total * keep + sum(sums);
  peak = new_peak;
  return keep;
}

template <typename E>
struct Chunk {
  const float* panels[CHUNK_PANELS];
  const float* values[CHUNK_PANELS];
  const float* key_scales[CHUNK_PANELS];
  const float* value_scales[CHUNK_PANELS];

  // Finds the panels of positions first, first + 16, ... of a row; converts them unless they are floats.
  void find(const Problem& a, const int32_t* pages, int64_t kv_head, int64_t first, int num_panels, Scratch& scratch) {
    const int64_t panel_size = PANEL * a.head_dim;
    for (int b = 0; b < num_panels; ++b) {
      const int64_t panel = first / PANEL + b;
      const int64_t where = (int64_t{pages[panel / a.page_panels]} * a.num_kv + kv_head) * a.page_panels +
                            panel % a.page_panels;
      const E* k = static_cast<const E*>(a.keys) + where * panel_size;
      const E* v = static_cast<const E*>(a.values) + where * panel_size;
      if constexpr (std::is_same_v<E, float>) {
        panels[b] = k;
        values[b] = v;
      } else {
        float* k_float = scratch.keys.data() + b * panel_size;
        float* v_float = scratch.values.data() + b * panel_size;
        convert(k, panel_size, k_float);
        convert(v, panel_size, v_float);
        panels[b] = k_float;
        values[b] = v_float;
      }
      if (a.key_scales != nullptr) {
        key_scales[b] = a.key_scales + where * PANEL;
        value_scales[b] = a.value_scales + where * PANEL;
      }
    }
  }
};

template <typename E>
void run_item(const Problem& a, const Item& item, Partials& partials) {
  thread_local Scratch scratch;
  const int64_t h = a.head_dim, stride = a.num_kv * a.group * h;
  const int rows = item.num_tokens * a.group;
  scratch.fit(rows, h, !std::is_same_v<E, float>);
  const int64_t token = a.starts[item.row] + item.first_token;
  const int64_t offset = token * stride + item.kv_head * a.group * h;
  for (int t = 0; t < item.num_tokens; ++t)
    for (int64_t i = 0; i < a.group * h; ++i)
      scratch.q[t * a.group * h + i] = a.q[offset + t * stride + i] * a.scale;
  std::fill_n(scratch.acc.begin(), rows * h, 0.0f);
  std::fill_n(scratch.peak.begin(), rows, LOWEST);
  std::fill_n(scratch.total.begin(), rows, 0.0f);

  const int32_t* pages = a.table + item.row * a.table_width;
  const int64_t length = a.starts[item.row + 1] - a.starts[item.row];
  const int64_t first_pos = a.context[item.row] - length + item.first_token;
  const bool is_quantized = a.key_scales != nullptr;
  Chunk<E> chunk;
  for (int64_t first = item.first_key / PANEL * PANEL; first < item.end_key; first += KEY_CHUNK) {
    const int num_panels = std::min<int64_t>(CHUNK_PANELS, (item.end_key - first + PANEL - 1) / PANEL);
    chunk.find(a, pages, item.kv_head, first, num_panels, scratch);
    for (int m = 0; m < rows; m += MR)
      FOR_ROWS(score_rows, std::min(MR, rows - m), scratch.q.data() + m * h, chunk.panels, chunk.values, num_panels, h,
               scratch.scores.data() + m * KEY_CHUNK);
    for (int m = 0; m < rows; ++m) {
      const int64_t pos = first_pos + m / a.group;
      const int64_t seen_from = a.window == 0 ? item.first_key : std::max<int64_t>(item.first_key, pos - a.window + 1);
      const int64_t seen_to = std::min<int64_t>(item.end_key, pos + 1);
      scratch.keep[m] = softmax_row(a, scratch.scores.data() + m * KEY_CHUNK, num_panels,
                                    is_quantized ? chunk.key_scales : nullptr,
                                    is_quantized ? chunk.value_scales : nullptr, seen_from - first, seen_to - first,
                                    scratch.peak[m], scratch.total[m]);
    }
    for (int m = 0; m < rows; m += MR)
      FOR_ROWS(value_rows, std::min(MR, rows - m), scratch.scores.data() + m * KEY_CHUNK, chunk.values, num_panels, h,
               scratch.keep.data() + m, scratch.acc.data() + m * h);
  }
  if (item.partial >= 0) {
    const int64_t at = item.partial * a.group;  // only single-token rows are divided: rows == group
    std::copy_n(scratch.peak.begin(), rows, partials.peak.begin() + at);
    std::copy_n(scratch.total.begin(), rows, partials.total.begin() + at);
    std::copy_n(scratch.acc.begin(), rows * h, partials.acc.begin() + at * h);
    return;
  }
  for (int m = 0; m < rows; ++m) {
    float* out = a.out + offset + m / a.group * stride + m % a.group * h;
    const float inverse = 1.0f / scratch.total[m];
    for (int64_t i = 0; i < h; ++i) out[i] = scratch.acc[m * h + i] * inverse;
  }
}

// Puts the parts of one (row, KV head) together: items[begin, end).
void combine(const Problem& a, const std::vector<Item>& items, size_t begin, size_t end, const Partials& parts) {
  const Item& head = items[begin];
  const int64_t h = a.head_dim;
  float* out = a.out + (a.starts[head.row] * a.num_kv + head.kv_head) * a.group * h;
  for (int64_t g = 0; g < a.group; ++g, out += h) {
    float peak = LOWEST, total = 0;
    for (size_t i = begin; i < end; ++i) peak = std::max(peak, parts.peak[items[i].partial * a.group + g]);
    std::fill_n(out, h, 0.0f);
    for (size_t i = begin; i < end; ++i) {
      const int64_t at = items[i].partial * a.group + g;
      const float weight = std::exp(parts.peak[at] - peak);
      total += parts.total[at] * weight;
      for (int64_t j = 0; j < h; ++j) out[j] += parts.acc[at * h + j] * weight;
    }
    for (int64_t j = 0; j < h; ++j) out[j] /= total;
  }
}

// Runs work(0) ... work(count - 1) on the pool's threads and this one.
template <typename Work>
void parallel_for(ffi::ThreadPool& pool, int64_t count, int64_t num_threads, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  // A thread that begins after all is done still looks at the counter, so it outlives this call.
  auto shared = std::make_shared<Shared>();
  auto drain = [count](Shared& s, const Work& work) {
    for (int64_t i; (i = s.next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      work(i);
      s.done.fetch_add(1, std::memory_order_release);
    }
  };
  const Work* held = &work;  // dereferenced only with an item in hand, while this call waits for that item
  for (int64_t t = 1; t < std::min(num_threads, count); ++t) pool.Schedule([=] { drain(*shared, *held); });
  drain(*shared, work);
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 2000) std::this_thread::yield();
}

// Cuts the batch into items. Returns the multiply-adds they take.
int64_t make_items(const Problem& a, int64_t num_rows, int64_t num_threads, std::vector<Item>& items) {
  const int64_t tile = std::max<int64_t>(1, QUERY_ROWS / a.group);
  int64_t work = 0, single_keys = 0;
  for (int64_t row = 0; row < num_rows; ++row)
    if (a.context[row] > 0 && a.starts[row + 1] - a.starts[row] == 1) single_keys += a.context[row];
  // Single-token rows longer than this are divided, so that every thread has several items.
  const int64_t split = std::max<int64_t>(MIN_SPLIT, single_keys * a.num_kv / (8 * num_threads) / PANEL * PANEL);
  int32_t num_partials = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t context = a.context[row], length = a.starts[row + 1] - a.starts[row];
    if (context == 0) continue;
    for (int64_t end = length; end > 0;) {  // the last tokens see most: they go first
      const int64_t begin = std::max<int64_t>(0, end - tile);
      const int64_t first_pos = context - length + begin, end_key = context - length + end;
      const int64_t first_key = a.window == 0 ? 0 : std::max<int64_t>(0, first_pos - a.window + 1);
      const int64_t keys = end_key - first_key;
      work += keys * (end - begin) * a.group * a.num_kv * a.head_dim * 2;
      const int64_t parts = length == 1 && num_threads > 1 ? std::max<int64_t>(1, (keys + split / 2) / split) : 1;
      const int64_t part = ((keys + parts - 1) / parts + PANEL - 1) / PANEL * PANEL;
      for (int64_t kv_head = 0; kv_head < a.num_kv; ++kv_head)
        for (int64_t from = first_key; from < end_key; from += part)
          items.push_back({int32_t(row), int32_t(kv_head), int32_t(begin), int32_t(end - begin), int32_t(from),
                           int32_t(std::min(from + part, end_key)), keys > part ? num_partials++ : -1});
      end = begin;
    }
  }
  return work;
}

// Rows without a context and tokens of no row mean nothing, but must be finite.
void zero_unowned(const Problem& a, int64_t num_rows, int64_t num_tokens) {
  const int64_t stride = a.num_kv * a.group * a.head_dim;
  for (int64_t row = 0; row < num_rows; ++row)
    if (a.context[row] == 0)
      std::fill(a.out + a.starts[row] * stride, a.out + a.starts[row + 1] * stride, 0.0f);
  std::fill(a.out + a.starts[num_rows] * stride, a.out + num_tokens * stride, 0.0f);
}

template <typename E>
void attend_all(const Problem& a, int64_t num_rows, ffi::ThreadPool& pool) {
  std::vector<Item> items;
  int64_t num_threads = std::max<int64_t>(1, pool.num_threads());
  if (make_items(a, num_rows, num_threads, items) < INLINE_WORK) num_threads = 1;
  Partials parts;
  int64_t num_partials = 0;
  for (const Item& item : items) num_partials = std::max<int64_t>(num_partials, item.partial + 1);
  parts.peak.resize(num_partials * a.group);
  parts.total.resize(num_partials * a.group);
  parts.acc.resize(num_partials * a.group * a.head_dim);
  parallel_for(pool, items.size(), num_threads, [&](int64_t i) { run_item<E>(a, items[i], parts); });
  for (size_t begin = 0; begin < items.size();) {
    size_t end = begin + 1;
    if (items[begin].partial >= 0) {
      while (end < items.size() && items[end].row == items[begin].row && items[end].kv_head == items[begin].kv_head)
        ++end;
      combine(a, items, begin, end, parts);
    }
    begin = end;
  }
}

using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;

ffi::Error attend(ffi::ThreadPool pool, Floats q, Ints table, Ints context, Ints starts, ffi::AnyBuffer keys,
                  ffi::AnyBuffer values, Floats key_scales, Floats value_scales, ffi::Result<Floats> out, float scale,
                  float soft_cap, int64_t window) {
  const auto q_dims = q.dimensions(), key_dims = keys.dimensions();
  const bool is_quantized = key_scales.element_count() > 0;
  Problem a{.q = q.typed_data(),
            .table = table.typed_data(),
            .context = context.typed_data(),
            .starts = starts.typed_data(),
            .keys = keys.untyped_data(),
            .values = values.untyped_data(),
            .key_scales = is_quantized ? key_scales.typed_data() : nullptr,
            .value_scales = is_quantized ? value_scales.typed_data() : nullptr,
            .out = out->typed_data(),
            .table_width = table.dimensions()[1],
            .num_kv = q_dims[1],
            .group = q_dims[2],
            .head_dim = q_dims[3],
            .page_panels = key_dims[2],
            .window = window,
            .scale = scale,
            .soft_cap = soft_cap};
  const int64_t num_rows = context.element_count();
  zero_unowned(a, num_rows, q_dims[0]);
  switch (keys.element_type()) {
    case ffi::F32: attend_all<float>(a, num_rows, pool); break;
    case ffi::BF16: attend_all<BFloat16>(a, num_rows, pool); break;
    case ffi::S8: attend_all<int8_t>(a, num_rows, pool); break;
    case ffi::F8E4M3FN: attend_all<Float8>(a, num_rows, pool); break;
    default: return ffi::Error::InvalidArgument("pages of this dtype are not supported");
  }
  return ffi::Error::Success();
}

// Writes T tokens' keys and values, elements of E, at (page, offset).
template <typename E>
void write_all(ffi::AnyBuffer& keys, ffi::AnyBuffer& values, const int32_t* page, const int32_t* offset, E* key_pages,
               E* value_pages, int64_t page_panels) {
  const auto dims = keys.dimensions();
  const int64_t num_tokens = dims[0], num_kv = dims[1], head_dim = dims[2];
  const E* k = static_cast<const E*>(keys.untyped_data());
  const E* v = static_cast<const E*>(values.untyped_data());
  for (int64_t t = 0; t < num_tokens; ++t)
    for (int64_t kv = 0; kv < num_kv; ++kv, k += head_dim, v += head_dim) {
      const int64_t panel = (page[t] * num_kv + kv) * page_panels + offset[t] / PANEL;
      E* to_key = key_pages + panel * head_dim * PANEL + offset[t] % PANEL;
      for (int64_t i = 0; i < head_dim; ++i) to_key[i * PANEL] = k[i];
      std::memcpy(value_pages + (panel * PANEL + offset[t] % PANEL) * head_dim, v, head_dim * sizeof(E));
    }
}

ffi::Error write(ffi::AnyBuffer keys, ffi::AnyBuffer values, Ints page, Ints offset, ffi::AnyBuffer key_pages,
                 ffi::AnyBuffer value_pages, ffi::Result<ffi::AnyBuffer> new_keys,
                 ffi::Result<ffi::AnyBuffer> new_values) {
  // The results are aliased to the pages; XLA hands both the same memory.
  if (new_keys->untyped_data() != key_pages.untyped_data() || new_values->untyped_data() != value_pages.untyped_data())
    return ffi::Error::Internal("pages are not updated in place");
  const int64_t page_panels = key_pages.dimensions()[2];
  const auto run = [&](auto element) {
    using E = decltype(element);
    write_all<E>(keys, values, page.typed_data(), offset.typed_data(), static_cast<E*>(key_pages.untyped_data()),
                 static_cast<E*>(value_pages.untyped_data()), page_panels);
  };
  switch (ffi::ByteWidth(key_pages.element_type())) {
    case 4: run(uint32_t{}); break;
    case 2: run(uint16_t{}); break;
    case 1: run(uint8_t{}); break;
    default: return ffi::Error::InvalidArgument("pages of this dtype are not supported");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Attend, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(Write, write,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Ints>()
                                  .Arg<Ints>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());
