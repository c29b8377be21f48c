/* Backwards that Python has checked. A later backward whose tensors are alike runs the same launcher, without Python's checks. */
#pragma once

#include "launcher.h"
#include "python.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <memory>
#include <vector>

namespace onepass {

using torch::autograd::variable_list;

// What a tensor is like, or that there is none.
struct Signature {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype{};
  at::Device device{at::kCPU};
  c10::DispatchKeySet keys;  // show negative bits, zero tensors, subclasses, and wrappers of functorch

  explicit Signature(const at::Tensor& t) : defined(t.defined()) {
    if (defined) {
      sizes = t.sizes().vec(), strides = t.strides().vec(), dtype = t.scalar_type(), device = t.device(), keys = t.key_set();
    }
  }

  bool same(const at::Tensor& t) const {
    if (!defined || !t.defined()) {
      return defined == t.defined();
    }
    return t.key_set() == keys && t.scalar_type() == dtype && t.device() == device && t.sizes() == sizes && t.strides() == strides;
  }
};

// Whether nothing is active that would change how tensors are computed with. Dispatch keys of this thread show modes, transforms of
// functorch, and tracing.
struct Context {
  c10::DispatchKeySet included, excluded;

  static Context now() {
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    return {keys.included_, keys.excluded_};
  }

  bool is_current() const {
    const auto keys = now();
    return included == keys.included && excluded == keys.excluded && !c10::GradMode::is_enabled() &&
        !torch::autograd::ForwardADLevel::try_get_by_idx(0);
  }
};

struct Backward {
  Context context;
  std::vector<bool> needs;
  std::vector<Signature> tensors;  // the gradients, then the saved tensors
  object launch;
  std::vector<int> arguments;  // of `launch`: numbers of tensors, -1 for None
  object last_argument;
  object in_cpp;  // a function of `launcher`, which computes the same from the same tensors, without the last argument; or None
  std::vector<int> results;  // for each gradient to return, the number of its result, -1 for None

  bool fits(const std::vector<bool>& needed, const variable_list& given) const {
    if (needed != needs || given.size() != tensors.size() || !context.is_current()) {
      return false;
    }
    for (size_t i = 0; i < given.size(); ++i) {
      if (!tensors[i].same(given[i])) {
        return false;
      }
    }
    return true;
  }

  // Return the gradients, or an empty list if the launcher raised a RuntimeError. Then Python's checks may raise a better one.
  variable_list run(const variable_list& given) const {
    variable_list gradients;
    gradients.reserve(results.size());
    if (const auto* launcher = launcher_in(in_cpp.ptr())) {
      if (run_in_cpp(*launcher, given, gradients)) {
        return gradients;
      }
    }
    c10::SmallVector<object, 10> values;
    for (const int number : arguments) {
      values.push_back(number < 0 ? object(pybind11::none()) : own(THPVariable_Wrap(given[number])));
    }
    values.push_back(last_argument);
    c10::SmallVector<PyObject*, 10> pointers;
    for (const auto& value : values) {
      pointers.push_back(value.ptr());
    }
    PyObject* found = PyObject_Vectorcall(launch.ptr(), pointers.data(), pointers.size(), nullptr);
    if (!found && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
      PyErr_Clear();
      return {};
    }
    const object owned = own(found);
    for (const int number : results) {
      gradients.push_back(number < 0 ? at::Tensor() : tensor_or_undefined(PyTuple_GET_ITEM(found, number)));
    }
    return gradients;
  }

 private:
  // As a call from Python, but without a Python object for each tensor. Return false, and do nothing, if the call is unusual.
  bool run_in_cpp(const Launcher& launcher, const variable_list& given, variable_list& gradients) const {
    Given inputs;
    for (const auto& input : launcher.inputs) {
      const int number = arguments[input.argument];
      if (number < 0) {
        return false;
      }
      inputs.push_back(&given[number]);
    }
    Made made;
    if (!launcher.run(inputs, nullptr, made)) {
      return false;
    }
    for (const int number : results) {
      const auto output = number < 0 ? -1 : launcher.returned[number];
      gradients.push_back(output < 0 ? at::Tensor() : made[output]);
    }
    return true;
  }
};

constexpr const char* REMEMBERED = "onepass.remembered";
constexpr size_t MOST_REMEMBERED = 4;

// Another thread may change the list while a launcher runs without the GIL. So a node copies the pointer that it uses.
using Remembered = std::vector<std::shared_ptr<const Backward>>;

// The list in a capsule, or NULL if the object is something else.
inline Remembered* remembered_in(PyObject* capsule) {
  return PyCapsule_IsValid(capsule, REMEMBERED) ? static_cast<Remembered*>(PyCapsule_GetPointer(capsule, REMEMBERED)) : nullptr;
}

inline std::shared_ptr<const Backward> find(PyObject* capsule, const std::vector<bool>& needs, const variable_list& tensors) {
  if (const auto* list = remembered_in(capsule)) {
    for (const auto& backward : *list) {
      if (backward->fits(needs, tensors)) {
        return backward;
      }
    }
  }
  return nullptr;
}

// memory() -> an empty list
inline PyObject* memory(PyObject*, PyObject*) {
  return PyCapsule_New(new Remembered(), REMEMBERED, [](PyObject* dead) { delete remembered_in(dead); });
}

// remember(memory, needs, tensors, launch, arguments, last_argument, results, in_cpp=None)
inline PyObject* remember(PyObject*, PyObject* const* given, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(number == 7 || number == 8, "expected 7 or 8 arguments, got ", number);
  auto* list = remembered_in(given[0]);
  TORCH_CHECK_TYPE(list, "expected what memory() returned");
  auto owned = std::make_shared<Backward>(Backward{Context::now()});
  auto& made = *owned;
  made.needs = pybind11::handle(given[1]).cast<std::vector<bool>>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[2]); ++i) {
    made.tensors.emplace_back(tensor_or_undefined(PyTuple_GET_ITEM(given[2], i)));
  }
  made.launch = reinterpret_borrow<object>(given[3]);
  made.arguments = pybind11::handle(given[4]).cast<std::vector<int>>();
  made.last_argument = reinterpret_borrow<object>(given[5]);
  made.results = pybind11::handle(given[6]).cast<std::vector<int>>();
  made.in_cpp = number > 7 ? reinterpret_borrow<object>(given[7]) : object(pybind11::none());
  list->insert(list->begin(), std::move(owned));
  if (list->size() > MOST_REMEMBERED) {
    const auto oldest = std::move(list->back());  // it dies when the list is whole again: that may run Python code, which may use the list
    list->pop_back();
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace onepass
