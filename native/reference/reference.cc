#include "native/reference/reference.h"

#include <algorithm>
#include <cmath>

#include "native/reference/number_format.h"

namespace flashverify::reference {
namespace {

constexpr double kInfinity = HUGE_VAL;

int32_t int_at(const fv_tensor& tensor, std::initializer_list<int64_t> indices) {
  return static_cast<const int32_t*>(tensor.data)[element_offset(tensor, indices)];
}

double scale_at(const fv_tensor& scale, int64_t head) {
  if (scale.dtype == FV_DTYPE_NONE) return 1;
  return element(scale, {scale.shape[0] == 1 ? 0 : head});
}

// The larger; NaN if either is. std::max would drop it.
double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }

struct Request {
  int64_t index;
  int64_t first_row;
  int64_t query_len;
  int64_t seq_len;
};

std::vector<Request> requests(const fv_attention_params& params) {
  const int64_t batch = params.seq_lens.shape[0];
  std::vector<Request> all;
  int64_t first_row = 0;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t query_len =
        params.query_start_loc.dtype == FV_DTYPE_NONE
            ? params.q.shape[0] / batch
            : int_at(params.query_start_loc, {i + 1}) - int_at(params.query_start_loc, {i});
    all.push_back({i, first_row, query_len, int_at(params.seq_lens, {i})});
    first_row += query_len;
  }
  return all;
}

// The keys or values of one head of one request, [seq_len][head_dim].
std::vector<std::vector<double>> gather(const fv_attention_params& params, const fv_tensor& cache,
                                        const Request& request, int64_t kv_head) {
  const int64_t page_size = cache.shape[1];
  std::vector<std::vector<double>> tokens;
  for (int64_t t = 0; t < request.seq_len; ++t) {
    const int64_t page = int_at(params.page_table, {request.index, t / page_size});
    std::vector<double> token;
    for (int64_t d = 0; d < cache.shape[3]; ++d) {
      token.push_back(element(cache, {page, t % page_size, kv_head, d}));
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace

std::vector<Row> attention(const fv_attention_params& params) {
  const int64_t q_heads = params.q.shape[1];
  const int64_t head_dim = params.q.shape[2];
  const int64_t kv_heads = params.k_cache.shape[2];
  std::vector<Row> rows(static_cast<size_t>(params.q.shape[0] * q_heads));

  for (const Request& request : requests(params)) {
    for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
      const auto keys = gather(params, params.k_cache, request, kv_head);
      const auto values = gather(params, params.v_cache, request, kv_head);
      const double score_scale =
          static_cast<double>(params.softmax_scale) * scale_at(params.k_dequant_scale, kv_head);
      const double value_scale = scale_at(params.v_dequant_scale, kv_head);
      const int64_t group = q_heads / kv_heads;

      for (int64_t j = 0; j < request.query_len; ++j) {
        // Row j sees keys 0 .. n - q + j when causal; a window keeps the last.
        int64_t end =
            params.causal != 0 ? request.seq_len - request.query_len + j + 1 : request.seq_len;
        end = std::max<int64_t>(end, 0);
        const int64_t begin = params.window > 0 ? std::max<int64_t>(end - params.window, 0) : 0;
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          Row& row = rows[static_cast<size_t>((request.first_row + j) * q_heads + head)];
          row.keys = end - begin;
          row.out.assign(static_cast<size_t>(head_dim), 0);
          row.out_terms.assign(static_cast<size_t>(head_dim), 0);
          row.lse = -kInfinity;
          if (row.keys == 0) continue;

          std::vector<double> query;
          for (int64_t d = 0; d < head_dim; ++d) {
            query.push_back(element(params.q, {request.first_row + j, head, d}));
          }
          std::vector<double> scores;
          double largest = -kInfinity;
          for (int64_t t = begin; t < end; ++t) {
            const auto& key = keys[static_cast<size_t>(t)];
            double dot = 0;
            double terms = 0;
            for (size_t d = 0; d < query.size(); ++d) {
              dot += query[d] * key[d];
              terms += std::fabs(query[d] * key[d]);
            }
            double score = dot * score_scale;
            if (params.softcap > 0) {
              const double cap = params.softcap;
              score = cap * std::tanh(score / cap);
            }
            scores.push_back(score);
            largest = larger(largest, score);
            row.largest_score = larger(row.largest_score, std::fabs(score));
            row.largest_products = larger(row.largest_products, terms * std::fabs(score_scale));
          }
          const double sink =
              params.sinks.dtype == FV_DTYPE_NONE ? -kInfinity : element(params.sinks, {head});
          const double reference_score = larger(largest, sink);
          double sum = 0;
          for (size_t i = 0; i < scores.size(); ++i) {
            // Written so that a score of +inf gives NaN, as inf - inf does.
            const double weight = std::exp(scores[i] - reference_score);
            sum += weight;
            const auto& value = values[static_cast<size_t>(begin) + i];
            for (size_t d = 0; d < value.size(); ++d) {
              row.out[d] += weight * value[d];
              row.out_terms[d] += std::fabs(weight * value[d]);
              row.largest_value = larger(row.largest_value, std::fabs(value[d] * value_scale));
            }
          }
          row.probability_sum = sum * std::exp(reference_score - largest);
          sum += std::exp(sink - reference_score);
          for (size_t d = 0; d < row.out.size(); ++d) {
            row.out[d] *= value_scale / sum;
            row.out_terms[d] *= value_scale / sum;
          }
          row.lse = reference_score + std::log(sum);
        }
      }
    }
  }
  return rows;
}

void append(const fv_append_params& params) {
  const int64_t page_size = params.k_cache.shape[1];
  for (int64_t token = 0; token < params.key.shape[0]; ++token) {
    const int64_t at = token * params.slot_mapping.stride[0];
    const int64_t slot = params.slot_mapping.dtype == FV_DTYPE_INT64
                             ? static_cast<const int64_t*>(params.slot_mapping.data)[at]
                             : static_cast<const int32_t*>(params.slot_mapping.data)[at];
    if (slot < 0) continue;
    const auto write = [&](const fv_tensor& source, const fv_tensor& cache,
                           const fv_tensor& scale) {
      for (int64_t head = 0; head < cache.shape[2]; ++head) {
        for (int64_t d = 0; d < cache.shape[3]; ++d) {
          // The division is FP32: part of the contract, as two roundings may
          // differ from one.
          const float quotient = static_cast<float>(element(source, {token, head, d})) /
                                 static_cast<float>(scale_at(scale, head));
          store(cache.data, element_offset(cache, {slot / page_size, slot % page_size, head, d}),
                cache.dtype, static_cast<double>(quotient));
        }
      }
    };
    write(params.key, params.k_cache, params.k_dequant_scale);
    write(params.value, params.v_cache, params.v_dequant_scale);
  }
}

std::vector<Row> merge(const fv_merge_params& params) {
  const int64_t states = params.outs.shape[0];
  const int64_t heads = params.outs.shape[2];
  std::vector<Row> rows;
  for (int64_t r = 0; r < params.outs.shape[1]; ++r) {
    for (int64_t head = 0; head < heads; ++head) {
      Row row;
      row.out.assign(static_cast<size_t>(params.outs.shape[3]), 0);
      row.out_terms = row.out;
      double largest = -kInfinity;
      for (int64_t s = 0; s < states; ++s) {
        const double lse = element(params.lses, {s, r, head});
        largest = larger(largest, lse);
        row.largest_score =
            std::isinf(lse) ? row.largest_score : larger(row.largest_score, std::fabs(lse));
      }
      double sum = 0;
      for (int64_t s = 0; s < states; ++s) {
        const double lse = element(params.lses, {s, r, head});
        if (lse == -kInfinity) continue;  // saw nothing: whatever its output holds
        ++row.keys;
        const double weight = std::exp(lse - largest);
        sum += weight;
        for (size_t d = 0; d < row.out.size(); ++d) {
          const double term = weight * element(params.outs, {s, r, head, static_cast<int64_t>(d)});
          row.out[d] += term;
          row.out_terms[d] += std::fabs(term);
        }
      }
      row.lse = row.keys == 0 ? -kInfinity : largest + std::log(sum);
      for (size_t d = 0; d < row.out.size(); ++d) {
        if (row.keys > 0) row.out[d] /= sum;
        if (row.keys > 0) row.out_terms[d] /= sum;
      }
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

}  // namespace flashverify::reference
