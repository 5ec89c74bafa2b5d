/* The C interface with every option, against the formulas of cutloss.hpp written out densely in double precision. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cutloss/cutloss.h"

enum { N = 6, D = 3, V = 7 };

static float e[N * D], c[V * D], bias[V], token_weights[N], class_weights[V], lse_cotangent[N];
static int64_t labels[N];
static const float scale = 0.7f, cap = 4, smoothing = 0.1f, zeta = 0.05f, cotangent = 1.5f;
static const double denominator = 3.25;

static int failures;

static void near(const char* what, double got, double want) {
  /* A few hundred roundings of numbers of about 1, each 2^-24. */
  if (fabs(got - want) <= 3e-5 * (1 + fabs(want))) return;
  fprintf(stderr, "%s is %.9g, wanted %.9g\n", what, got, want);
  ++failures;
}

struct dense {
  double loss, nll[N], lse[N], entropy[N], d_e[N * D], d_c[V * D], d_bias[V], mean_logits[V];
  int64_t argmax[N], rank[N], valid;
};

/* Row i and label i + 1, all rows being one sequence. */
static void compute(struct dense* out) {
  double sum_w = 0;
  memset(out, 0, sizeof *out);
  for (int v = 0; v < V; ++v) sum_w += class_weights[v];
  for (int i = 0; i + 1 < N; ++i) {
    const int64_t y = labels[i + 1];
    double z[V], slope[V], total = 0, entropy = 0, smooth = 0;
    if (y == -100) continue;
    ++out->valid;
    for (int v = 0; v < V; ++v) {
      double r = bias[v];
      for (int d = 0; d < D; ++d) r += (double)scale * e[i * D + d] * c[v * D + d];
      z[v] = cap * tanh(r / cap);
      slope[v] = 1 - (z[v] / cap) * (z[v] / cap);
      total += exp(z[v]);
    }
    const double lse = log(total), a = cotangent / denominator * token_weights[i];
    for (int v = 0; v < V; ++v) {
      entropy -= exp(z[v] - lse) * (z[v] - lse);
      smooth += class_weights[v] * (lse - z[v]);
      out->rank[i] += z[v] > z[y];
      out->mean_logits[v] += z[v];
      if (z[v] > z[out->argmax[i]]) out->argmax[i] = v;
    }
    out->nll[i] = lse - z[y];
    out->lse[i] = lse;
    out->entropy[i] = entropy;
    out->loss += token_weights[i] / denominator *
                 ((1 - smoothing) * class_weights[y] * out->nll[i] + smoothing / V * smooth + zeta * lse * lse);
    for (int v = 0; v < V; ++v) {
      const double mass = (1 - smoothing) * class_weights[y] + smoothing / V * sum_w + 2 * zeta * lse;
      const double target = (v == y ? (1 - smoothing) * class_weights[y] : 0) + smoothing / V * class_weights[v];
      const double dz = (exp(z[v] - lse) * (a * mass + lse_cotangent[i]) - a * target) * slope[v];
      out->d_bias[v] += dz;
      for (int d = 0; d < D; ++d) {
        out->d_e[i * D + d] += dz * scale * c[v * D + d];
        out->d_c[v * D + d] += dz * scale * e[i * D + d];
      }
    }
  }
  for (int v = 0; v < V; ++v) out->mean_logits[v] /= (double)out->valid;
}

static void make_data(void) {
  for (int i = 0; i < N * D; ++i) e[i] = (float)((i * 37 + 11) % 19) / 9 - 1;
  for (int i = 0; i < V * D; ++i) c[i] = (float)((i * 53 + 5) % 23) / 11 - 1;
  for (int v = 0; v < V; ++v) bias[v] = (float)(v % 3) / 4, class_weights[v] = 1 + (float)(v % 4) / 2;
  for (int i = 0; i < N; ++i) {
    labels[i] = i == 2 ? -100 : (i * 5 + 1) % V;
    token_weights[i] = 1 + (float)i / 4;
    lse_cotangent[i] = (float)(i % 3) / 8;
  }
}

static void must(cutloss_status status, const char* what) {
  if (status == CUTLOSS_OK) return;
  fprintf(stderr, "%s: %d, %s\n", what, (int)status, cutloss_last_error());
  exit(1);
}

static void run_all(void) {
  cutloss_problem p;
  cutloss_problem_init(&p);
  p.tokens = N, p.hidden = D, p.vocab = V;
  p.want_d_e = p.want_d_c = p.want_d_bias = p.accumulate_d_c = 1;
  p.has_bias = 1, p.bias_dtype = CUTLOSS_F32;
  p.logit_scale = scale, p.softcap = cap, p.label_smoothing = smoothing, p.z_loss = zeta;
  p.token_weights = p.class_weights = p.lse_cotangent = 1;
  p.shift = 1;
  p.entropy = p.argmax = p.rank = p.mean_logits = 1;
  p.top_k = 2;

  cutloss_plan* plan = NULL;
  must(cutloss_make_plan(&p, NULL, &plan), "cutloss_make_plan");
  const size_t bytes = cutloss_plan_workspace_bytes(plan);
  void* workspace = malloc(bytes);

  cutloss_inputs in;
  cutloss_inputs_init(&in);
  in.e = e, in.c = c, in.labels = labels, in.cotangent = &cotangent, in.bias = bias;
  in.token_weights = token_weights, in.class_weights = class_weights, in.lse_cotangent = lse_cotangent;
  in.has_denominator = 1, in.denominator = denominator;

  float loss, nll[N], lse[N], d_e[N * D], d_c[V * D], d_bias[V], entropy[N], mean_logits[V], top_logprobs[N * 2];
  int64_t valid, argmax[N], rank[N], top_ids[N * 2];
  uint8_t correct[N];
  for (int i = 0; i < V * D; ++i) d_c[i] = 1;
  cutloss_outputs out;
  cutloss_outputs_init(&out);
  out.loss = &loss, out.nll = nll, out.lse = lse, out.d_e = d_e, out.d_c = d_c, out.d_bias = d_bias;
  out.valid_count = &valid, out.entropy = entropy, out.argmax = argmax, out.correct = correct, out.rank = rank;
  out.top_k_ids = top_ids, out.top_k_logprobs = top_logprobs, out.mean_logits = mean_logits;
  must(cutloss_run(plan, &in, &out, workspace, bytes, NULL), "cutloss_run");

  struct dense want;
  compute(&want);
  near("loss", loss, want.loss);
  near("valid_count", (double)valid, (double)want.valid);
  for (int i = 0; i < N; ++i) {
    const int counts = i + 1 < N && labels[i + 1] != -100;
    near("nll", nll[i], want.nll[i]);
    near("lse", lse[i], want.lse[i]);
    near("entropy", entropy[i], want.entropy[i]);
    near("argmax", (double)argmax[i], counts ? (double)want.argmax[i] : -1);
    near("top_k_ids", (double)top_ids[2 * i], counts ? (double)want.argmax[i] : -1);
    near("correct", correct[i], counts && want.argmax[i] == labels[i + 1]);
    near("rank", (double)rank[i], counts ? (double)want.rank[i] : -1);
    if (counts && top_ids[2 * i + 1] == labels[i + 1]) near("top_k_logprobs", top_logprobs[2 * i + 1], -want.nll[i]);
  }
  for (int i = 0; i < N * D; ++i) near("d_e", d_e[i], want.d_e[i]);
  for (int i = 0; i < V * D; ++i) near("d_c", d_c[i], 1 + want.d_c[i]);
  for (int v = 0; v < V; ++v) near("d_bias", d_bias[v], want.d_bias[v]);
  for (int v = 0; v < V; ++v) near("mean_logits", mean_logits[v], want.mean_logits[v]);
  free(workspace);
  cutloss_plan_free(plan);
}

/* Two shards of the table, a run each, joined: the loss of the whole. The shard without a row's label sees soft targets
 * that are all padding, and a cotangent of lse, so that it computes the row. */
static void run_shards(void) {
  enum { SPLIT = 4 };
  float max[2 * N], sum[2 * N], target[2 * N], nll[N], lse[N], whole_nll[N], whole_lse[N], zeros[N] = {0};
  int64_t whole_labels[N];
  for (int i = 0; i < N; ++i) whole_labels[i] = (i * 5 + 1) % V;
  for (int s = -1; s < 2; ++s) {
    const int begin = s == 1 ? SPLIT : 0, end = s == 0 ? SPLIT : V;
    int64_t ids[N];
    float ones[N];
    for (int i = 0; i < N; ++i) {
      ids[i] = whole_labels[i] >= begin && whole_labels[i] < end ? whole_labels[i] - begin : -100;
      ones[i] = 1;
    }
    cutloss_problem p;
    cutloss_problem_init(&p);
    p.tokens = N, p.hidden = D, p.vocab = end - begin, p.soft_targets = 1, p.lse_cotangent = 1;
    cutloss_inputs in;
    cutloss_inputs_init(&in);
    in.e = e, in.c = c + begin * D, in.soft_ids = ids, in.soft_probabilities = ones, in.lse_cotangent = zeros;
    cutloss_outputs out;
    cutloss_outputs_init(&out);
    out.nll = s < 0 ? whole_nll : nll, out.lse = s < 0 ? whole_lse : lse;
    cutloss_plan* plan = NULL;
    must(cutloss_make_plan(&p, NULL, &plan), "cutloss_make_plan of a shard");
    void* workspace = malloc(cutloss_plan_workspace_bytes(plan));
    must(cutloss_run(plan, &in, &out, workspace, cutloss_plan_workspace_bytes(plan), NULL), "cutloss_run of a shard");
    free(workspace);
    cutloss_plan_free(plan);
    for (int i = 0; s >= 0 && i < N; ++i) {
      max[s * N + i] = lse[i];
      sum[s * N + i] = ids[i] < 0 ? 1 : -expm1f(-nll[i]);
      target[s * N + i] = ids[i] < 0 ? -INFINITY : lse[i] - nll[i];
    }
  }
  must(cutloss_combine_shards(2, N, max, sum, target, lse, nll), "cutloss_combine_shards");
  for (int i = 0; i < N; ++i) near("lse of shards", lse[i], whole_lse[i]);
  for (int i = 0; i < N; ++i) near("nll of shards", nll[i], whole_nll[i]);
}

static void refusals(void) {
  cutloss_problem p;
  cutloss_plan* plan = NULL;
  cutloss_problem_init(NULL);
  cutloss_problem_init(&p);
  p.tokens = p.hidden = p.vocab = 4;
  p.filter = 9;
  if (cutloss_make_plan(&p, NULL, &plan) != CUTLOSS_INVALID_ARGUMENT || plan != NULL ||
      strcmp(cutloss_last_error(), "filter is 9; it must be in [0, 4)") != 0) {
    fprintf(stderr, "a bad filter: %s\n", cutloss_last_error());
    ++failures;
  }
}

int main(void) {
  make_data();
  run_all();
  run_shards();
  refusals();
  printf("cutloss %s from C: %d failures\n", cutloss_version(), failures);
  return failures != 0;
}
