// Block sizes that `cutloss tune` has measured, and the small file they are kept in: one for each CPU model.
//
//   cutloss tuning 1                                                              the version of the format
//   cpu AuthenticAMD, family 25, model 1, stepping 1, AMD EPYC                    where it was measured
//   avx2 stream 640 f32 vd 1024 168 2048 512 768                                  target mode D dtype layout, 5 sizes
//   sum 0123456789abcdef                                                          FNV-1a of every byte above
//
// Nothing in a file is trusted. One that is cut, changed, of another version or of another CPU is left out as a whole,
// with a note that says why; sizes out of range are refused even where the sum is right.
#ifndef CUTLOSS_SRC_PLAN_TUNING_H_
#define CUTLOSS_SRC_PLAN_TUNING_H_

#include <string>
#include <string_view>
#include <vector>

#include "cutloss/cutloss.hpp"

namespace cutloss {

// Of the first processor that a file like /proc/cpuinfo lists: what tells one model from another, on one line.
std::string cpu_model(const std::string& cpuinfo);
const std::string& this_cpu();  // read once: the kernel may take milliseconds for the file of a large machine

// $CUTLOSS_TUNING_FILE, else a file in $XDG_CACHE_HOME/cutloss or ~/.cache/cutloss; "" if there is nowhere, or if
// CUTLOSS_TUNING_FILE is "none".
std::string tuning_path(std::string_view cpu);

// 64 bits of FNV-1a, as 16 hexadecimal digits.
std::string tuning_sum(std::string_view bytes);

struct TuningFile {
  std::vector<TunedBlocks> entries;
  bool used = false;  // read and right
  std::string note;   // what became of it, for people
};
TuningFile read_tuning(const std::string& path, std::string_view cpu);
Status write_tuning(const std::string& path, std::string_view cpu, const std::vector<TunedBlocks>& entries);

// The entry for problems like this one in this mode, or null. Tokens and vocabulary are not looked at: what is best
// follows from D, the table's dtype and layout, and the caches. Nor are threads: the tile decides how sums are rounded,
// and the bits of a result must not change with the number of threads.
const TunedBlocks* find_tuned(const std::vector<TunedBlocks>& entries, const Problem& problem, Mode mode,
                              std::string_view target);

// What the planner uses where nothing was measured; vocab_tile 0 is "by the caches".
const Blocks& default_blocks();

// The same list with `entry` in place of the one for the same problems, or added.
std::vector<TunedBlocks> with_tuned(std::vector<TunedBlocks> entries, const TunedBlocks& entry);

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PLAN_TUNING_H_
