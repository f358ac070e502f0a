// One attention problem on the device: cache, queries, output, reference.
#ifndef FLASHVERIFY_NATIVE_CUDA_TESTING_CASE_H_
#define FLASHVERIFY_NATIVE_CUDA_TESTING_CASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "native/cuda/cuda.h"
#include "native/cuda/testing/gpu.h"

namespace flashverify::cuda::testing {

struct CaseSpec {
  std::vector<int> lengths;     // per request
  std::vector<int> query_lens;  // per request; all equal: no query_start_loc
  int q_heads = 6;
  int kv_heads = 1;
  int head_dim = 256;
  int page_size = 3296;
  fv_dtype kv_type = FV_DTYPE_FLOAT8_E4M3;
  fv_dtype q_type = FV_DTYPE_FLOAT16;
  fv_dtype out_type = FV_DTYPE_FLOAT16;
  fv_route route = FV_ROUTE_GROUPED_FP32;
  bool causal = true;
  int window = 0;
  float softcap = 0.0f;
  bool sinks = false;
  float k_scale = 1.0f;
  float v_scale = 1.0f;
  float q_scale = 1.0f;
  uint64_t seed = 1;
  uint64_t page_seed = 1;  // order of the pages
  int capacity = 0;        // tokens; 0: the longest length
  int token_padding = 0;   // bytes between the tokens of a page
  bool force_query_start = false;
  std::string image;
};

class Case {
 public:
  Case(Gpu& gpu, CaseSpec spec);
  ~Case();
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  const CaseSpec& spec() const { return spec_; }
  AttentionProblem problem() const;
  int rows() const { return rows_; }
  size_t cache_bytes() const { return cache_bytes_; }
  DevicePointer cache() const { return cache_; }
  DevicePointer element(int which, int request, int position, int head, int d) const;

  void set_length(int request, int length);
  // This case's only row takes row `row` of `other`'s queries.
  void copy_query(const Case& other, int row);
  // Enqueues; `target.stream` is the case's own.
  void run(Target target = {});
  std::string image() const { return image_; }
  uint32_t status();

  struct Error {
    double relative = 0;  // L2
    double worst_row = 0;
    double floor = 0;  // of rounding the exact output to the output's type
    double lse = 0;    // largest absolute error
    bool finite = true;
  };
  Error compare();
  // The output's bytes (rows x heads x dim) and log-sum-exps.
  std::vector<unsigned char> output_bytes();
  std::vector<float> lse();
  void poison_output();

 private:
  void reference();

  Gpu& gpu_;
  CaseSpec spec_;
  int rows_ = 0;
  int max_pages_ = 0;
  int pages_ = 0;
  int64_t page_bytes_ = 0;
  int64_t token_bytes_ = 0;
  size_t cache_bytes_ = 0;
  size_t workspace_bytes_ = 0;
  std::vector<int> table_;
  std::vector<int> starts_;
  std::vector<double> expected_;
  std::vector<double> expected_lse_;
  DevicePointer cache_ = 0, table_device_ = 0, lengths_device_ = 0, starts_device_ = 0, q_ = 0,
                out_ = 0, lse_ = 0, workspace_ = 0, sinks_ = 0, scales_ = 0;
  std::string image_;
};

double to_double(const unsigned char* p, fv_dtype type);

}  // namespace flashverify::cuda::testing

#endif  // FLASHVERIFY_NATIVE_CUDA_TESTING_CASE_H_
