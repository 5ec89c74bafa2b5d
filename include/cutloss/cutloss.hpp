// cutloss: the training loss of a language model's head, loss(E * C^T, labels), and its gradients, without ever
// storing the tokens x vocabulary logits.
//
// Three steps, each a value that can be looked at:
//
//   Problem  what is asked    shapes, dtypes, layouts, objective, which gradients are wanted
//   Plan     how              mode, tile sizes, workspace bytes; made by make_plan(), a pure function
//   run()    does it          reads Inputs, writes Outputs, uses the workspace the plan asked for and nothing else
//
// Symbols: N tokens, D hidden size, V vocabulary; E [N, D] hidden states, C the head's table ([V, D] or [D, V]);
// r = logit_scale * E * C^T + bias, z = softcap * tanh(r / softcap) logits (z = r without softcap),
// lse_i = log sum_v exp z_iv, p = exp(z - lse), nll_i = lse_i - z_{i, label_i}.
// 1u is one product of the size of the logits, 2*N*V*D floating-point operations.
//
// The loss of row i, with class weights w (1 without them, W = sum_v w_v), label y, smoothing s, token weight t:
//   l_i = t_i * [ (1 - s) w_y nll_i + (s / V) sum_v w_v (lse_i - z_iv) + z_loss * lse_i^2 ]
// or, with soft targets (ids k, probabilities q), l_i = t_i * [ sum_k q_ik (lse_i - z_ik) + z_loss * lse_i^2 ].
//   sum: sum_i l_i      none: l      mean: sum_i l_i / denominator, by default sum_i t_i w_{y_i} (sum_i t_i sum_k q_ik)
// These are torch.nn.functional.cross_entropy's definitions where it has the option. Gradients are of the loss times
// its cotangent, plus of sum_i lse_cotangent_i lse_i.
//
// The library never prints, aborts, exits or throws; every failure is a Status whose text names the argument, the
// value and the limit. (Only a value of the standard library may throw std::bad_alloc: available_targets(), json(), and
// copies of what holds strings.) All entry points may be called from several threads at once, and in the child of a
// fork(); none leaves a thread behind or a trace in the caller's floating-point environment.
#ifndef CUTLOSS_CUTLOSS_HPP_
#define CUTLOSS_CUTLOSS_HPP_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#define CUTLOSS_VERSION "0.1.0"

namespace cutloss {

// ---------------------------------------------------------------------------------------------------- errors

enum class StatusCode {
  ok,
  invalid_argument,  // the problem, an option or a label breaks a rule; nothing was written
  budget_too_small,  // no mode fits the memory budget; the text names the smallest budget that works
  out_of_memory,     // the workspace, or something small beside it, could not be allocated; nothing was written
  unavailable,       // a kernel target was asked for that this CPU or build does not have
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}
  bool ok() const { return code_ == StatusCode::ok; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::ok;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

// ----------------------------------------------------------------------------------------------------- problem

enum class DType { f32, bf16, i32, i64, f16 };
enum class HeadLayout { vd, dv };          // the table is [V, D] (a tied embedding) or [D, V] (a JAX kernel)
enum class Reduction { mean, sum, none };  // the formulas stand at the top of this file
enum class BadLabels { error, nan };       // a label outside [0, V): refuse, or NaN for its row, class weight 1

// Which parts of the gradient may be left out (the loss is always exact). epsilon is a probability.
enum class Filter {
  none,
  certified,  // entries with p < epsilon are dropped, and what that costs is bounded: see FilterReport
  unbiased,   // such an entry is kept with probability p / epsilon and then weighs epsilon: right in expectation
  tile,       // whole tiles with every |dz| < epsilon are dropped: the filter of Cut Cross-Entropy, for comparison
};

// How the work is done. All but sparse are exact; they differ in memory and in how often the logits are formed.
enum class Mode {
  automatic,  // the fastest that fits the budget
  loss,       // no gradient: 1u
  stream,     // dE only, the logits formed once: 2u, extra memory a tile and one block of tokens
  chunk,      // dC (and dE): logits of a chunk of tokens kept: 3u, extra memory chunk x V
  recompute,  // dC (and dE): nothing kept: 4u (3u for dC alone), extra memory a tile
  sparse,     // with a filter: 1u and the kept entries' share of the rest
};

// Element (not byte) strides of an array, in the array's own axis order. Zero and negative strides are legal.
struct Strides {
  std::int64_t axis0 = 0;
  std::int64_t axis1 = 0;
};

// What else is wanted of each row, out of the same pass. Ignored rows have 0 (ids, rank: -1). A row of soft targets
// that is all padding has no target: nll 0, rank -1, never correct, even where z_loss or lse_cotangent has it looked
// at. Where the lse is NaN nothing has an order: ids and rank are -1, nothing is correct.
struct Metrics {
  bool entropy = false;      // -sum_v p_v log p_v
  bool argmax = false;       // id of the largest logit (the lowest of equals), and whether it is the label
  bool rank = false;         // number of logits larger than the label's
  std::int64_t top_k = 0;    // ids and log-probabilities of the k largest logits, in [0, 128]; ids -1 beyond V
  bool mean_logits = false;  // [V], mean over valid rows; with softcap this forms the logits once more (1u)
};

struct Problem {
  std::int64_t tokens = 0;  // N; may be 0
  std::int64_t hidden = 0;  // D in [1, 2^24]
  std::int64_t vocab = 0;   // V >= 1

  DType e_dtype = DType::f32;      // f32, bf16 or f16
  DType c_dtype = DType::f32;      // the same, independent of e_dtype; sums are always f32
  DType label_dtype = DType::i64;  // i32 or i64
  HeadLayout head_layout = HeadLayout::vd;
  std::optional<Strides> e_strides;  // default: contiguous [N, D]
  std::optional<Strides> c_strides;  // default: contiguous in head_layout
  std::int64_t label_stride = 1;

  Reduction reduction = Reduction::mean;
  std::int64_t ignore_index = -100;  // also pads the ids of soft targets
  BadLabels bad_labels = BadLabels::error;
  std::optional<DType> bias_dtype;  // given: there is a bias [V]; f32, bf16 or f16. -inf masks an id (without softcap)
  float logit_scale = 1.0f;         // finite; the inverse of a temperature
  std::optional<float> softcap;     // cap * tanh(logit / cap), cap in [2^-64, 2^64]
  bool token_weights = false;       // f32 [N]; a row of weight 0 is not looked at
  bool class_weights = false;       // f32 [V]
  float label_smoothing = 0.0f;     // in [0, 1]
  float z_loss = 0.0f;              // finite
  std::int64_t soft_targets = 0;    // K >= 1: targets are ids and probabilities [N, K], and there are no labels
  std::int64_t shift = 0;           // row i is matched with label (or soft target) i + shift ...
  std::int64_t sequence = 0;        // ... of the same sequence of this many rows; 0: all N rows are one sequence
  bool lse_cotangent = false;       // there is an upstream gradient of lse, f32 [N]
  Metrics metrics;

  Filter filter = Filter::none;  // certified, unbiased: with tolerance or epsilon; tile: with epsilon
  std::optional<float>
      tolerance;                 // certified: most dropped mass of a row; unbiased: most sqrt(epsilon * mass below it)
  std::optional<float> epsilon;  // a probability, in (0, 1)
  bool vocab_order = false;      // the vocabulary is worked through in a given order, i64 [V], a permutation

  bool want_d_e = false;           // dE [N, D], contiguous
  bool want_d_c = false;           // dC in head_layout, contiguous
  bool want_d_bias = false;        // [V]
  std::optional<DType> d_e_dtype;  // default: e_dtype
  std::optional<DType> d_c_dtype;  // default: c_dtype
  // Add to what the output holds, rounding once; but in mode chunk, dC and dbias in f32 once a chunk unless
  // compensated, and in mode sparse once more for the rows that are done exactly after all.
  bool accumulate_d_e = false;
  bool accumulate_d_c = false;
  bool accumulate_d_bias = false;
  bool compensated =
      false;  // mode chunk: dC is summed over chunks with its rounding errors kept, 4 or 8 V D bytes more
};

// Every policy on a Problem lives behind this one function; make_plan() calls it.
Status validate(const Problem& problem);

// ------------------------------------------------------------------------------------------------------- plan

// Upper limits of the block sizes that the planner considers.
struct Blocks {
  std::int64_t token_block = 0;
  std::int64_t vocab_tile = 0;
  std::int64_t chunk_tokens = 0;
  std::int64_t head_tokens = 0;
  std::int64_t head_rows = 0;  // vocabulary rows of a task of the dC pass in mode recompute
};

// What `cutloss tune` found to be fastest for problems with this table in this mode, on this target.
struct TunedBlocks {
  std::string target;
  Mode mode = Mode::automatic;
  std::int64_t hidden = 0;
  DType c_dtype = DType::f32;
  HeadLayout head_layout = HeadLayout::vd;
  Blocks blocks;
};

// A tuning table as text, one line an entry, and back; an error names the first line that is wrong.
std::string format_tuning(const std::vector<TunedBlocks>& entries);
Result<std::vector<TunedBlocks>> parse_tuning(std::string_view lines);

// What the planner may know of the machine. detect() reads caches, CPU quota, affinity, memory limits and the file of
// `cutloss tune`; CUTLOSS_TARGET in the environment forces a kernel target, CUTLOSS_TUNING_FILE names another file
// ("none": no file). A Machine may also be written by hand: planning is a pure function of it.
struct Machine {
  std::string target;               // a name out of available_targets()
  int threads = 1;                  // affinity and cgroup quota (rounded down) respected
  std::size_t l1_bytes = 32 << 10;  // per core
  std::size_t l2_bytes = 512 << 10;
  std::size_t l3_bytes = 8 << 20;         // shared
  std::uint64_t spare_bytes = 512 << 20;  // most that mode chunk takes without a budget; less where less may be had
  std::vector<TunedBlocks> tuning;
  std::string tuning_note;  // where `tuning` comes from, or why a file was ignored; nothing reads it
  static Result<Machine> detect();
};

// Names of the kernel targets that this build has and this CPU can run, best first ("avx512", "avx2", ...).
std::vector<std::string> available_targets();

struct Limits {
  Mode mode = Mode::automatic;
  std::optional<std::uint64_t> budget_bytes;  // for the workspace: memory beyond inputs and requested outputs
  int threads = 0;  // most threads, up to 1024; 0: as many as the machine allows and the work is worth
};

struct Rejection {
  Mode mode;
  std::string reason;
};

struct Plan {
  Problem problem;
  Mode mode = Mode::loss;
  std::string target;                 // kernel target
  int threads = 1;                    // most workers run() uses; the result does not depend on how many it gets
  std::int64_t token_block = 0;       // tokens per task of the loss pass
  std::int64_t vocab_tile = 0;        // vocabulary rows per tile
  std::int64_t vocab_slices = 1;      // parts of the vocabulary handled as separate tasks, combined in fixed order
  std::int64_t chunk_tokens = 0;      // mode chunk: tokens whose logits are held at once
  std::int64_t head_tokens = 0;       // tokens per step of the dC pass
  std::int64_t head_tiles = 0;        // vocabulary tiles per task of the dC pass
  bool head_sum = false;              // dC is summed apart from its output, which is not f32 or keeps rounding errors
  float epsilon = 0;                  // of a filter; 0: none
  std::int64_t group_tokens = 0;      // mode sparse: rows whose kept entries are held at once, if dC is wanted
  std::int64_t panel_entries = 0;     // mode sparse: entries of a panel of rows, above which it is done exactly
  std::shared_ptr<const Plan> exact;  // mode sparse: how rows are redone
  bool tuned = false;                 // the block sizes are those of Machine::tuning
  std::uint64_t workspace_bytes = 0;
  double units = 0;  // cost in u
  double flops = 0;
  std::vector<Rejection> rejected;  // modes not taken, and why

  std::string json() const;
};

Result<Plan> make_plan(const Problem& problem, const Limits& limits, const Machine& machine);

// The most tokens for which make_plan() finds a plan: the problem's own number of them does not matter. 0 if not even
// one token fits; problems of 2^46 elements and more are not looked at.
Result<std::int64_t> max_tokens(const Problem& problem, const Limits& limits, const Machine& machine);

// Bytes that no way of computing the gradients can do without: the gradients themselves.
std::uint64_t gradient_bytes(const Problem& problem);

// -------------------------------------------------------------------------------------------------------- run

// Where parallel work runs. parallel_for calls body(task, worker) once for every task in [0, tasks), with
// 0 <= worker < concurrency(), never two calls at once with the same worker, and returns when all are done.
// The calling thread should take part, so that a pool with no free thread still makes progress.
class Executor {
 public:
  using Body = std::function<void(std::int64_t task, int worker)>;
  virtual ~Executor() = default;
  virtual int concurrency() const = 0;
  virtual void parallel_for(std::int64_t tasks, const Body& body) = 0;
};

// Starts threads for each parallel_for and joins them at its end: nothing is left running between calls, so fork()
// is safe. A thread that cannot be started is done without. Null if there is no memory for it.
std::unique_ptr<Executor> make_thread_executor(int threads);

struct Inputs {
  const void* e = nullptr;                    // [N, D]
  const void* c = nullptr;                    // [V, D] or [D, V]
  const void* labels = nullptr;               // [N]; null with soft targets
  const float* cotangent = nullptr;           // upstream gradient of the loss: one value, or [N] for none; null: 1
  const void* bias = nullptr;                 // [V]; this and the following are there exactly if the problem says so
  const float* token_weights = nullptr;       // [N]
  const float* class_weights = nullptr;       // [V]
  const float* lse_cotangent = nullptr;       // [N]
  const void* soft_ids = nullptr;             // [N, K] in label_dtype, contiguous
  const float* soft_probabilities = nullptr;  // [N, K]
  const std::int64_t* vocab_order = nullptr;  // [V]
  std::optional<double> denominator = std::nullopt;  // of a mean, 0 or in f32's normal range; 0: loss and gradients 0
  std::uint64_t seed = 0;                            // filter unbiased: another seed, other random numbers
};

// What a filter did. For row i let A_i be the factor of its softmax in dz (g_i, plus what smoothing, z_loss and
// lse_cotangent add), and c_v the row v of the table.
struct FilterReport {
  std::int64_t rows = 0;         // rows that were filtered or redone
  std::int64_t rows_redone = 0;  // done exactly after all: over the tolerance, or too flat to be worth filtering (of a
                                 // frozen head from where that showed)
  double kept_entries = 0;       // of the rows that stayed filtered, labels included
  double epsilon = 0;            // the one that was used
  double dropped_mass_mean = 0;  // delta_i: softmax mass below epsilon, dropped or left to chance
  double dropped_mass_max = 0;
  double error_bound = 0;  // largest bound on ||error of dE_i||: certified |scale A_i| delta_i max_v ||c_v - c_mean||,
                           // unbiased (root mean square) |scale A_i| sqrt(epsilon delta_i) max_v ||c_v||
};

// Null outputs are not written, except that wanted gradients must be there. Ignored rows get 0 everywhere.
struct Outputs {
  float* loss = nullptr;                // one value, or [N] for Reduction::none
  float* nll = nullptr;                 // [N]; with soft targets of the likeliest id
  float* lse = nullptr;                 // [N]
  void* d_e = nullptr;                  // [N, D], contiguous
  void* d_c = nullptr;                  // like the table, contiguous
  std::int64_t* valid_count = nullptr;  // rows with a label that is not ignore_index (with soft targets: all rows)
  void* d_bias = nullptr;               // [V]; the gradients and metrics are there exactly if the problem wants them
  float* entropy = nullptr;             // [N]
  std::int64_t* argmax = nullptr;       // [N]
  std::uint8_t* correct = nullptr;    // [N], 1 where argmax is the label (of soft targets: the likeliest); may be null
  std::int64_t* rank = nullptr;       // [N]
  std::int64_t* top_k_ids = nullptr;  // [N, k], by falling logit
  float* top_k_logprobs = nullptr;    // [N, k]
  float* mean_logits = nullptr;       // [V]
  FilterReport* filter_report = nullptr;  // may be null
};

// Same bits for the same problem and plan, for any executor and any number of threads.
// workspace: at least plan.workspace_bytes, any alignment. executor: null for threads of our own.
// No two buffers may overlap. After an error the outputs are as they were: all that can fail comes before the first
// write. (An executor of the caller's own that throws leaves them undefined; its exception passes through.)
Status run(const Plan& plan, const Inputs& inputs, const Outputs& outputs, std::span<std::byte> workspace,
           Executor* executor = nullptr);

// The same, with a workspace of its own for the time of the call.
Status run(const Plan& plan, const Inputs& inputs, const Outputs& outputs, Executor* executor = nullptr);

// An order for Inputs::vocab_order, i64 [V]: by falling mean logit over the rows that count. Filters keep fewer entries
// in it, since the running lse is nearly the final one from the start. It holds for other batches of the same kind of
// text: learn once, keep. V * D work; deterministic.
Status learn_vocab_order(const Problem& problem, const Inputs& inputs, std::int64_t* order,
                         Executor* executor = nullptr);

// ------------------------------------------------------------------------------------------------------- names

std::string_view version();
std::string_view name(DType);
std::string_view name(HeadLayout);
std::string_view name(Reduction);
std::string_view name(Mode);
std::string_view name(Filter);
std::size_t size_of(DType);

}  // namespace cutloss

#endif  // CUTLOSS_CUTLOSS_HPP_
