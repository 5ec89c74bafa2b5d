/* cutloss, C interface: the training loss of a language model's head and its gradients, without the tokens x vocabulary
 * logits. cutloss.hpp explains the words; this header gives the same three steps to C, and to anything that can call C.
 *
 *   cutloss_problem problem;
 *   cutloss_problem_init(&problem);
 *   problem.tokens = n;  problem.hidden = d;  problem.vocab = v;  problem.want_d_e = 1;
 *   cutloss_plan* plan;
 *   if (cutloss_make_plan(&problem, NULL, &plan) != CUTLOSS_OK) puts(cutloss_last_error());
 *   void* workspace = malloc(cutloss_plan_workspace_bytes(plan));
 *   cutloss_inputs in;  cutloss_inputs_init(&in);   in.e = e;  in.c = c;  in.labels = labels;
 *   cutloss_outputs out;  cutloss_outputs_init(&out);  out.loss = &loss;  out.d_e = d_e;
 *   cutloss_run(plan, &in, &out, workspace, cutloss_plan_workspace_bytes(plan), NULL);
 *   cutloss_plan_free(plan);
 *
 * Every struct begins with its size, which the _init functions set together with the defaults. The size is the version
 * of the struct, and the only one there is: a library newer than the program reads and writes only what the program
 * knew of. For that, C programs hand over sizeof: _init is a macro for _init_sized. The functions of the same names are
 * for other languages; they set a struct as this library knows it. New fields come last. No exception crosses this
 * interface; nothing is printed; no call aborts; _init(NULL) does nothing.
 */
#ifndef CUTLOSS_CUTLOSS_H_
#define CUTLOSS_CUTLOSS_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define CUTLOSS_API __attribute__((visibility("default")))
#else
#define CUTLOSS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  CUTLOSS_OK = 0,
  CUTLOSS_INVALID_ARGUMENT = 1, /* the problem, an option or a label breaks a rule */
  CUTLOSS_BUDGET_TOO_SMALL = 2, /* cutloss_last_error() names the smallest budget that works */
  CUTLOSS_OUT_OF_MEMORY = 3,
  CUTLOSS_UNAVAILABLE = 4, /* no such kernel target in this build or CPU */
  CUTLOSS_INTERNAL = 5     /* a fault of the library */
} cutloss_status;

typedef enum { CUTLOSS_F32 = 0, CUTLOSS_BF16 = 1, CUTLOSS_I32 = 2, CUTLOSS_I64 = 3, CUTLOSS_F16 = 4 } cutloss_dtype;
typedef enum { CUTLOSS_HEAD_VD = 0, CUTLOSS_HEAD_DV = 1 } cutloss_head_layout;
typedef enum { CUTLOSS_MEAN = 0, CUTLOSS_SUM = 1, CUTLOSS_NONE = 2 } cutloss_reduction;
typedef enum { CUTLOSS_BAD_LABELS_ERROR = 0, CUTLOSS_BAD_LABELS_NAN = 1 } cutloss_bad_labels;
typedef enum {
  CUTLOSS_MODE_AUTO = 0,
  CUTLOSS_MODE_LOSS = 1,
  CUTLOSS_MODE_STREAM = 2,
  CUTLOSS_MODE_CHUNK = 3,
  CUTLOSS_MODE_RECOMPUTE = 4,
  CUTLOSS_MODE_SPARSE = 5
} cutloss_mode;
typedef enum {
  CUTLOSS_FILTER_NONE = 0,
  CUTLOSS_FILTER_CERTIFIED = 1,
  CUTLOSS_FILTER_UNBIASED = 2,
  CUTLOSS_FILTER_TILE = 3
} cutloss_filter;

typedef struct {
  size_t size;
  int64_t tokens, hidden, vocab;        /* N >= 0, D in [1, 2^24], V >= 1 */
  int32_t e_dtype, c_dtype;             /* CUTLOSS_F32, CUTLOSS_BF16 or CUTLOSS_F16 */
  int32_t label_dtype;                  /* CUTLOSS_I32 or CUTLOSS_I64 */
  int32_t head_layout;                  /* cutloss_head_layout */
  int32_t has_e_strides, has_c_strides; /* 0: contiguous, and the strides below are not read */
  int64_t e_strides[2], c_strides[2];   /* in elements, axis by axis of the array as it is given */
  int64_t label_stride;                 /* in elements */
  int32_t reduction;                    /* cutloss_reduction */
  int32_t bad_labels;                   /* cutloss_bad_labels */
  int64_t ignore_index;
  float softcap; /* 0: none; else in [2^-64, 2^64] */
  int32_t want_d_e, want_d_c;
  int32_t reserved; /* not read: older structs had padding here */

  /* After 0.1.0. Flags say which inputs there are. */
  int32_t has_bias, bias_dtype; /* 0: no bias, and bias_dtype is not read */
  float logit_scale;            /* 1 by default */
  float label_smoothing, z_loss;
  int32_t token_weights, class_weights, lse_cotangent, vocab_order;
  int64_t soft_targets;    /* K; 0: labels */
  int64_t shift, sequence; /* sequence 0: all rows are one */
  int32_t want_d_bias;
  int32_t accumulate_d_e, accumulate_d_c, accumulate_d_bias; /* add to what the output holds */
  int32_t has_d_e_dtype, d_e_dtype;                          /* 0: e_dtype */
  int32_t has_d_c_dtype, d_c_dtype;                          /* 0: c_dtype */
  int32_t compensated;
  int32_t entropy, argmax, rank, mean_logits; /* metrics */
  int32_t filter;                             /* cutloss_filter */
  float tolerance, epsilon;                   /* 0: not given */
  int64_t top_k;                              /* a metric too: k, or 0 */
} cutloss_problem;

typedef struct {
  size_t size;
  int32_t mode;          /* cutloss_mode */
  int32_t threads;       /* up to 1024; 0: choose */
  int32_t has_budget;    /* 0: no budget, and budget_bytes is not read */
  uint64_t budget_bytes; /* for the workspace */
  const char* target;    /* a kernel target by name; NULL: CUTLOSS_TARGET or the best */
} cutloss_limits;

typedef struct {
  size_t size;
  const void *e, *c, *labels;
  const float* cotangent; /* NULL: 1; one value, or [N] with CUTLOSS_NONE */

  /* After 0.1.0. There exactly if the problem says so. */
  const void* bias;                                           /* [V], bias_dtype */
  const float *token_weights, *class_weights, *lse_cotangent; /* [N], [V], [N] */
  const void* soft_ids;                                       /* [N, K], label_dtype */
  const float* soft_probabilities;                            /* [N, K] */
  const int64_t* vocab_order;                                 /* [V] */
  double denominator;                                         /* of a mean */
  int32_t has_denominator;                                    /* 0: the sum of the weights */
  uint64_t seed;                                              /* of CUTLOSS_FILTER_UNBIASED */
} cutloss_inputs;

/* See cutloss::FilterReport. */
typedef struct {
  size_t size;
  int64_t rows, rows_redone;
  double kept_entries, epsilon, dropped_mass_mean, dropped_mass_max, error_bound;
} cutloss_filter_report;

typedef struct {
  size_t size;
  float *loss, *nll, *lse; /* [1] or [N], [N], [N]; NULL: not wanted */
  void *d_e, *d_c;
  int64_t* valid_count;

  /* After 0.1.0. There exactly if the problem wants them, but for correct and filter_report, which may be NULL. */
  void* d_bias;                         /* [V], bias_dtype */
  float* entropy;                       /* [N] */
  int64_t* argmax;                      /* [N] */
  uint8_t* correct;                     /* [N], with argmax */
  int64_t* rank;                        /* [N] */
  int64_t* top_k_ids;                   /* [N, k] */
  float* top_k_logprobs;                /* [N, k] */
  float* mean_logits;                   /* [V] */
  cutloss_filter_report* filter_report; /* its size must be set */
} cutloss_outputs;

/* Where parallel work runs; see cutloss::Executor. parallel_for calls body(body_context, task, worker) once for every
 * task in [0, tasks), 0 <= worker < concurrency, and returns when all are done. */
typedef struct {
  size_t size;
  void* context;
  int32_t concurrency;
  void (*parallel_for)(void* context, int64_t tasks, void (*body)(void* body_context, int64_t task, int32_t worker),
                       void* body_context);
} cutloss_executor;

typedef struct cutloss_plan cutloss_plan;

CUTLOSS_API void cutloss_problem_init(cutloss_problem* problem);
CUTLOSS_API void cutloss_limits_init(cutloss_limits* limits);
CUTLOSS_API void cutloss_inputs_init(cutloss_inputs* inputs);
CUTLOSS_API void cutloss_outputs_init(cutloss_outputs* outputs);
CUTLOSS_API void cutloss_filter_report_init(cutloss_filter_report* report);
CUTLOSS_API void cutloss_problem_init_sized(cutloss_problem* problem, size_t size);
CUTLOSS_API void cutloss_limits_init_sized(cutloss_limits* limits, size_t size);
CUTLOSS_API void cutloss_inputs_init_sized(cutloss_inputs* inputs, size_t size);
CUTLOSS_API void cutloss_outputs_init_sized(cutloss_outputs* outputs, size_t size);
CUTLOSS_API void cutloss_filter_report_init_sized(cutloss_filter_report* report, size_t size);
#define cutloss_problem_init(problem) cutloss_problem_init_sized(problem, sizeof(cutloss_problem))
#define cutloss_limits_init(limits) cutloss_limits_init_sized(limits, sizeof(cutloss_limits))
#define cutloss_inputs_init(inputs) cutloss_inputs_init_sized(inputs, sizeof(cutloss_inputs))
#define cutloss_outputs_init(outputs) cutloss_outputs_init_sized(outputs, sizeof(cutloss_outputs))
#define cutloss_filter_report_init(report) cutloss_filter_report_init_sized(report, sizeof(cutloss_filter_report))

/* limits may be NULL. On success *out is a plan to be freed, else NULL. */
CUTLOSS_API cutloss_status cutloss_make_plan(const cutloss_problem* problem, const cutloss_limits* limits,
                                             cutloss_plan** out);
CUTLOSS_API size_t cutloss_plan_workspace_bytes(const cutloss_plan* plan);
CUTLOSS_API const char* cutloss_plan_json(const cutloss_plan* plan); /* lives as long as the plan */
CUTLOSS_API void cutloss_plan_free(cutloss_plan* plan);              /* NULL is fine */

/* executor may be NULL: threads of the library's own for the time of the call. */
CUTLOSS_API cutloss_status cutloss_run(const cutloss_plan* plan, const cutloss_inputs* inputs,
                                       const cutloss_outputs* outputs, void* workspace, size_t workspace_bytes,
                                       const cutloss_executor* executor);

/* An order for cutloss_inputs.vocab_order, [V]: by falling mean logit. problem.vocab_order is not looked at. */
CUTLOSS_API cutloss_status cutloss_learn_vocab_order(const cutloss_problem* problem, const cutloss_inputs* inputs,
                                                     int64_t* order);

/* The loss of a vocabulary that is split into shards, from what each shard knows of each row. All arrays are
 * [shards, rows], contiguous; for the ids v of a shard, without the row's label where the shard holds it,
 *   max           the largest logit z_v, or any other reference m; -inf for a shard that has no other id
 *   sum           sum over v of exp(z_v - m), 0 or more
 *   target_logit  the label's logit where the shard holds the label, else -inf: "no target"
 * The label is kept apart, as within the library, so that a confident row keeps its digits:
 *   nll = log1p(s exp(m - z_y)),  lse = z_y + nll,  with m, s of all shards together.
 * A row without a target in any shard has its lse and an nll of +inf; two targets are an error. lse and nll are [rows]
 * and may be NULL; they may overlap no other array. In double precision, shard by shard: the same bits whoever calls.
 * From the lse and nll of a cutloss_run over one shard: max = lse, sum = 1 and target_logit = -inf where it does not
 * hold the label; max = lse, sum = -expm1(-nll), target_logit = lse - nll where it does. */
CUTLOSS_API cutloss_status cutloss_combine_shards(int64_t shards, int64_t rows, const float* max, const float* sum,
                                                  const float* target_logit, float* lse, float* nll);

/* What the last failing call on this thread had to say; "" if none failed. Valid until the next call. */
CUTLOSS_API const char* cutloss_last_error(void);
CUTLOSS_API const char* cutloss_version(void);

#ifdef __cplusplus
}
#endif

#endif /* CUTLOSS_CUTLOSS_H_ */
