/* An autograd function like torch.autograd.Function, which needs a fraction of its host time. dispatch/node.py has the same in
   Python, and describes the arguments. Python code computes, except for a backward
   that is like a remembered one. This file saves tensors, and links the result to the graph. */
#pragma once

#include "python.h"
#include "remembered.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

namespace onepass {

using namespace torch::autograd;

class OnepassNormBackward final : public Node {
 public:
  OnepassNormBackward(object backward, object state) : backward_(std::move(backward)), state_(std::move(state)) {
    remembered_ = own(PyObject_GetAttrString(state_.ptr(), "remembered"));
  }

  ~OnepassNormBackward() override {
    if (!Py_IsInitialized()) {  // Python's objects are gone
      backward_.release();
      state_.release();
      remembered_.release();
      return;
    }
    pybind11::gil_scoped_acquire gil;
    backward_ = {};
    state_ = {};
    remembered_ = {};
  }

  std::string name() const override {
    return "OnepassNormBackward";
  }

  void save(const Variable& tensor) {
    const bool is_output = tensor.defined() && tensor.grad_fn().get() == this;
    is_output_.push_back(is_output);
    saved_.emplace_back(tensor, is_output);
  }

  // torch calls `apply` and `release_variables` without the GIL, perhaps from several threads. The lock keeps one thread from freeing
  // tensors that another reads. A thread that waits for the lock must not hold the GIL: the one that has the lock may need it.
  variable_list apply(variable_list&& gradients) override {
    variable_list tensors;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tensors = with_saved(std::move(gradients));
    }
    return compute(std::move(tensors));
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& tensor : saved_) {
      tensor.reset_data();
    }
  }

  // Compiled autograd calls the next two. The first tells nodes apart, and the second puts a call of `by_python` into its graph. Tensors
  // are placeholders without shapes then, so nothing can be computed.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(reinterpret_cast<uint64_t>(backward_.ptr()));  // no other object gets these addresses: `run` below owns both
    args.collect(reinterpret_cast<uint64_t>(state_.ptr()));
    for (const bool needed : needs()) {
      args.collect(needed);
    }
    for (size_t i = 0; i < saved_.size(); ++i) {
      args.collect(saved_[i], is_output_[i]);
    }
  }

  variable_list apply_with_saved(const variable_list& inputs, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    std::vector<c10::IValue> saved;
    for (auto& tensor : saved_) {
      swap.before(tensor);
      saved.emplace_back(tensor.unpack(getptr()));
    }
    const auto run = [backward = backward_, state = state_, needed = needs()](
                         const variable_list& given, const std::vector<c10::IValue>& more) {
      variable_list tensors = given;
      for (size_t i = 0; given[0].defined() && i < more.size(); ++i) {
        tensors.push_back(more[i].toTensor());
      }
      return by_python(backward, state, needed, tensors);
    };
    const auto& compiler = getPyCompilerInterface();
    const std::vector<at::TypePtr> types(saved.size(), at::TensorType::get());
    const auto function = compiler->bind_function(swap.get_py_compiler(), name(), run, types, true, true);
    const auto like = IValuePacker<std::vector<std::optional<InputMetadata>>>::pack(get_input_metadata(next_edges()));
    auto result = compiler->call_function(swap.get_py_compiler(), "apply_functional", function, inputs, saved, like);
    for (auto& tensor : saved_) {
      swap.after(tensor);
    }
    return result;
  }

 private:
  // The gradients, then the saved tensors, which are absent if the first gradient is.
  variable_list with_saved(variable_list&& gradients) {
    variable_list tensors(std::move(gradients));
    if (tensors[0].defined()) {
      const auto self = getptr();
      for (const auto& tensor : saved_) {
        tensors.push_back(tensor.unpack(self));
      }
    }
    return tensors;
  }

  std::vector<bool> needs() const {
    std::vector<bool> found(num_outputs());
    for (size_t i = 0; i < found.size(); ++i) {
      found[i] = task_should_compute_output(i);
    }
    return found;
  }

  variable_list compute(variable_list&& given) {
    const pybind11::gil_scoped_acquire gil;
    const variable_list tensors(std::move(given));  // they are freed before the GIL is released
    const auto needed = needs();
    if (tensors[0].defined()) {
      if (const auto known = find(remembered_.ptr(), needed, tensors)) {
        auto found = known->run(tensors);
        if (!found.empty()) {
          return found;
        }
      }
    }
    return by_python(backward_, state_, needed, tensors);
  }

  static variable_list by_python(
      const object& backward, const object& state, const std::vector<bool>& needed, const variable_list& tensors) {
    const size_t count = needed.size();
    c10::SmallVector<object, 12> arguments{state, own(PyTuple_New(static_cast<Py_ssize_t>(count)))};
    for (size_t i = 0; i < count; ++i) {
      PyTuple_SET_ITEM(arguments[1].ptr(), static_cast<Py_ssize_t>(i), PyBool_FromLong(needed[i]));
    }
    for (const auto& tensor : tensors) {
      arguments.push_back(own(THPVariable_Wrap(tensor)));
    }
    const object found = call(backward.ptr(), arguments);
    TORCH_CHECK_TYPE(
        PyTuple_Check(found.ptr()) && PyTuple_GET_SIZE(found.ptr()) == static_cast<Py_ssize_t>(count),
        "a backward must return a tuple with a gradient, or None, for each input");
    variable_list result;
    result.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      result.push_back(tensor_or_undefined(PyTuple_GET_ITEM(found.ptr(), static_cast<Py_ssize_t>(i))));
    }
    return result;
  }

  object backward_;
  object state_;
  object remembered_;  // see remembered.h
  std::vector<SavedVariable> saved_;
  std::vector<bool> is_output_;  // of the saved tensors
};

// torch owned nodes by std::shared_ptr up to version 2.12 or so, and by c10::intrusive_ptr since then.
template <class Pointer = decltype(Edge::function)>
Pointer own_node(OnepassNormBackward* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(node, [](auto* unused) { deleteNode(unused); });  // frees long graphs without recursion
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

// node.apply(*gradients), which nodes of torch.autograd.Function have. A node of torch itself is only called: node(*gradients).
inline PyObject* apply_node(PyObject* node, PyObject* gradients) {
  return Py_TYPE(node)->tp_call(node, gradients, nullptr);
}

// The Python type of `y.grad_fn`. Without it, torch would use one type for all nodes that it does not know.
inline PyObject* node_type() {
  static PyTypeObject type;
  static PyMethodDef method = {"apply", apply_node, METH_VARARGS, nullptr};
  static const bool registered = [] {
    _initFunctionPyTypeObject(type, "OnepassNormBackward", nullptr, nullptr);
    const object described = own(PyDescr_NewMethod(&type, &method));
    PyDict_SetItemString(type.tp_dict, "apply", described.ptr());
    PyType_Modified(&type);
    registerCppFunction(typeid(OnepassNormBackward), &type);
    return true;
  }();
  (void)registered;
  return reinterpret_cast<PyObject*>(&type);
}

// Record that `outputs` were computed from `inputs`. The first `differentiable` outputs have gradients. `saved` is what the backward gets.
inline void record(
    object backward,
    object state,
    PyObject* const* inputs,
    Py_ssize_t number,
    const variable_list& outputs,
    size_t differentiable,
    const variable_list& saved) {
  auto* made = new OnepassNormBackward(std::move(backward), std::move(state));
  const auto node = own_node(made);
  edge_list edges;
  edges.reserve(number);
  for (Py_ssize_t i = 0; i < number; ++i) {
    const Variable input = tensor_or_undefined(inputs[i]);
    edges.push_back(input.defined() ? impl::gradient_edge(input) : Edge());
  }
  node->set_next_edges(std::move(edges));
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (i < differentiable) {
      set_history(outputs[i], node);
    } else {
      node->add_input_metadata(Node::undefined_input());  // the backward takes a gradient for each output, also if it is always None
    }
  }
  for (const auto& tensor : saved) {
    made->save(tensor);
  }
}

// apply(forward, backward, state, *inputs) -> outputs
inline PyObject* apply(PyObject*, PyObject* const* arguments, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(number >= 4, "expected forward, backward, state and at least one input, got ", number, " arguments");
  object found;
  {
    const at::AutoGradMode no_graph(false);
    found = own(PyObject_Vectorcall(arguments[0], arguments + 2, number - 2, nullptr));
  }
  TORCH_CHECK_TYPE(
      PyTuple_Check(found.ptr()) && PyTuple_GET_SIZE(found.ptr()) == 3,
      "a forward must return its outputs, how many of them have gradients, and the tensors to save");
  PyObject* outputs = PyTuple_GET_ITEM(found.ptr(), 0);
  const auto differentiable = PyLong_AsSize_t(PyTuple_GET_ITEM(found.ptr(), 1));
  const auto tensors = [](PyObject* tuple) {
    variable_list listed;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      listed.push_back(tensor_or_undefined(PyTuple_GET_ITEM(tuple, i)));
    }
    return listed;
  };
  record(
      reinterpret_borrow<object>(arguments[1]),
      reinterpret_borrow<object>(arguments[2]),
      arguments + 3,
      number - 3,
      PyTuple_Check(outputs) ? tensors(outputs) : variable_list{tensor_or_undefined(outputs)},
      differentiable,
      tensors(PyTuple_GET_ITEM(found.ptr(), 2)));
  Py_INCREF(outputs);
  return outputs;
  END_HANDLE_TH_ERRORS
}

}  // namespace onepass
