// Error texts: invalid("vocab", " is 0, but ...") without a formatting library in the core.
#ifndef CUTLOSS_SRC_PROBLEM_TEXT_H_
#define CUTLOSS_SRC_PROBLEM_TEXT_H_

#include <sstream>
#include <string>

#include "cutloss/cutloss.hpp"

namespace cutloss {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
Status invalid(const Parts&... parts) {
  return Status(StatusCode::invalid_argument, text(parts...));
}

}  // namespace cutloss

#endif  // CUTLOSS_SRC_PROBLEM_TEXT_H_
