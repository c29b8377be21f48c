/* What all parts of the front door need: owned Python objects, calls, and errors. Everything here needs the GIL. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace onepass {

using pybind11::object;
using pybind11::reinterpret_borrow;

[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();  // it may be raised in another thread
  throw std::move(error);
}

// Own what a function of Python's API returned.
inline object own(PyObject* made) {
  if (!made) {
    throw_python_error();
  }
  return pybind11::reinterpret_steal<object>(made);
}

template <class Objects>
object call(PyObject* function, const Objects& arguments) {
  c10::SmallVector<PyObject*, 32> pointers;
  for (const auto& argument : arguments) {
    pointers.push_back(argument.ptr());
  }
  return own(PyObject_Vectorcall(function, pointers.data(), pointers.size(), nullptr));
}

// The tensor in a Python object, or an undefined tensor for None.
inline at::Tensor tensor_or_undefined(PyObject* found) {
  if (found == Py_None) {
    return {};
  }
  TORCH_CHECK_TYPE(THPVariable_Check(found), "expected a tensor or None, got ", Py_TYPE(found)->tp_name);
  return THPVariable_Unpack(found);
}

}  // namespace onepass
