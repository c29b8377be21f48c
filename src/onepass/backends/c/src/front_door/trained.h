/* A norm with gradients that runs without Python: a launcher computes it, and a node of autograd remembers what its backward needs.
   `trained_norm` in dispatch/packed.py describes it. */
#pragma once

#include "launcher.h"
#include "node.h"

#include <memory>
#include <vector>

namespace onepass {

struct Trained {
  object launch;  // a function of `launcher`
  object careful;  // a Python function that does the same. It takes the calls that the launcher cannot
  object backward, state;  // of the node: see dispatch/node.py
  Py_ssize_t number;  // of arguments
  Py_ssize_t inputs;  // how many of them have gradients: the first ones
  std::vector<int> saved;  // an argument, -1 for None, or -2 - n for the n-th result of the launcher
  std::vector<int> outputs;  // results of the launcher
  std::vector<int> summed;  // if one of these arguments needs a gradient, so does the second output
  bool returns_pair;  // (y, second output or None), otherwise y

  object run(PyObject* const* arguments) const {
    const auto* launcher = launcher_in(launch.ptr());
    Made made;
    bool usual;
    {
      const at::AutoGradMode no_graph(false);
      usual = launcher->run(arguments, made);
    }
    if (!usual) {
      return own(PyObject_Vectorcall(careful.ptr(), arguments, number, nullptr));
    }
    variable_list results, kept;
    for (const int output : outputs) {
      results.push_back(made[launcher->returned[output]]);
    }
    for (const int place : saved) {
      kept.push_back(
          place >= 0       ? tensor_or_undefined(arguments[place])
              : place == -1 ? at::Tensor()
                            : made[launcher->returned[-2 - place]]);
    }
    size_t differentiable = 1;
    for (const int argument : summed) {
      if (THPVariable_Unpack(arguments[argument]).requires_grad()) {
        differentiable = 2;
      }
    }
    record(backward, state, arguments, inputs, results, differentiable, kept);
    object y = own(THPVariable_Wrap(results[0]));
    if (!returns_pair) {
      return y;
    }
    object second = results.size() > 1 ? own(THPVariable_Wrap(results[1])) : object(pybind11::none());
    return own(PyTuple_Pack(2, y.ptr(), second.ptr()));
  }
};

constexpr const char* TRAINED = "onepass.trained";

inline PyObject* run_trained(PyObject* capsule, PyObject* const* arguments, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  const auto* norm = static_cast<const Trained*>(PyCapsule_GetPointer(capsule, TRAINED));
  TORCH_CHECK_TYPE(number == norm->number, "expected ", norm->number, " arguments, got ", number);
  return norm->run(arguments).release().ptr();
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef trained_method = {
    "trained", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_trained)), METH_FASTCALL, nullptr};

// trained(description) -> function. The description is a dictionary.
inline PyObject* trained(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const auto from = reinterpret_borrow<pybind11::dict>(given);
  auto made = std::make_unique<Trained>();
  made->launch = from["launch"];
  TORCH_CHECK_TYPE(launcher_in(made->launch.ptr()), "expected what launcher() returned");
  made->careful = from["careful"];
  made->backward = from["backward"];
  made->state = from["state"];
  made->number = from["number"].cast<Py_ssize_t>();
  made->inputs = from["inputs"].cast<Py_ssize_t>();
  made->saved = from["saved"].cast<std::vector<int>>();
  made->outputs = from["outputs"].cast<std::vector<int>>();
  made->summed = from["summed"].cast<std::vector<int>>();
  made->returns_pair = from["returns_pair"].cast<bool>();
  object capsule = own(PyCapsule_New(made.release(), TRAINED, [](PyObject* dead) {
    delete static_cast<Trained*>(PyCapsule_GetPointer(dead, TRAINED));
  }));
  return PyCFunction_New(&trained_method, capsule.ptr());
  END_HANDLE_TH_ERRORS
}

}  // namespace onepass
