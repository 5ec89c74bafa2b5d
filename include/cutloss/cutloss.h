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
 * Every struct begins with its size, which the _init functions set together with the defaults: a library newer than the
 * program reads only what the program knew of. No exception crosses this interface; nothing is printed; no call aborts.
 */
#ifndef CUTLOSS_CUTLOSS_H_
#define CUTLOSS_CUTLOSS_H_

#include <stddef.h>
#include <stdint.h>

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

typedef enum { CUTLOSS_F32 = 0, CUTLOSS_BF16 = 1, CUTLOSS_I32 = 2, CUTLOSS_I64 = 3 } cutloss_dtype;
typedef enum { CUTLOSS_HEAD_VD = 0, CUTLOSS_HEAD_DV = 1 } cutloss_head_layout;
typedef enum { CUTLOSS_MEAN = 0, CUTLOSS_SUM = 1, CUTLOSS_NONE = 2 } cutloss_reduction;
typedef enum { CUTLOSS_BAD_LABELS_ERROR = 0, CUTLOSS_BAD_LABELS_NAN = 1 } cutloss_bad_labels;
typedef enum {
  CUTLOSS_MODE_AUTO = 0,
  CUTLOSS_MODE_LOSS = 1,
  CUTLOSS_MODE_STREAM = 2,
  CUTLOSS_MODE_CHUNK = 3,
  CUTLOSS_MODE_RECOMPUTE = 4
} cutloss_mode;

typedef struct {
  size_t size;
  int64_t tokens, hidden, vocab;        /* N >= 0, D in [1, 2^24], V >= 1 */
  int32_t e_dtype, c_dtype;             /* CUTLOSS_F32 or CUTLOSS_BF16 */
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
} cutloss_inputs;

typedef struct {
  size_t size;
  float *loss, *nll, *lse; /* [1] or [N], [N], [N]; NULL: not wanted */
  void *d_e, *d_c;
  int64_t* valid_count;
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

void cutloss_problem_init(cutloss_problem* problem);
void cutloss_limits_init(cutloss_limits* limits);
void cutloss_inputs_init(cutloss_inputs* inputs);
void cutloss_outputs_init(cutloss_outputs* outputs);

/* limits may be NULL. On success *out is a plan to be freed, else NULL. */
cutloss_status cutloss_make_plan(const cutloss_problem* problem, const cutloss_limits* limits, cutloss_plan** out);
size_t cutloss_plan_workspace_bytes(const cutloss_plan* plan);
const char* cutloss_plan_json(const cutloss_plan* plan); /* lives as long as the plan */
void cutloss_plan_free(cutloss_plan* plan);              /* NULL is fine */

/* executor may be NULL: threads of the library's own for the time of the call. */
cutloss_status cutloss_run(const cutloss_plan* plan, const cutloss_inputs* inputs, const cutloss_outputs* outputs,
                           void* workspace, size_t workspace_bytes, const cutloss_executor* executor);

/* What the last failing call on this thread had to say; "" if none failed. Valid until the next call. */
const char* cutloss_last_error(void);
const char* cutloss_version(void);

#ifdef __cplusplus
}
#endif

#endif /* CUTLOSS_CUTLOSS_H_ */
