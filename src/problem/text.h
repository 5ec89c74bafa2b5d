// Error texts: invalid("vocab", " is 0, but ...") without a formatting library in the core.
#ifndef CUTLOSS_SRC_PROBLEM_TEXT_H_
#define CUTLOSS_SRC_PROBLEM_TEXT_H_

#include <locale>
#include <sstream>
#include <string>

#include "cutloss/cutloss.hpp"

namespace cutloss {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());      // the host's may write 262144 as 262,144
  out.exceptions(std::ios_base::badbit);  // a stream swallows bad_alloc and goes on with half a text
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
Status invalid(const Parts&... parts) {
  return Status(StatusCode::invalid_argument, text(parts...));
}

// Short enough to need no memory itself.
inline Status out_of_memory() { return Status(StatusCode::out_of_memory, "out of memory"); }

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PROBLEM_TEXT_H_
