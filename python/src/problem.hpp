// Problem, Limits, Inputs and Outputs out of keyword arguments with the names of their fields.
#ifndef CUTLOSS_PYTHON_PROBLEM_HPP_
#define CUTLOSS_PYTHON_PROBLEM_HPP_

#include "cutloss/cutloss.hpp"
#include "fields.hpp"

namespace cutloss::python {

Problem read_problem(Fields& fields);
Limits read_limits(Fields& fields);
Inputs read_inputs(Fields& fields);  // arrays by address
Outputs read_outputs(Fields& fields);

}  // namespace cutloss::python

#endif  // CUTLOSS_PYTHON_PROBLEM_HPP_
