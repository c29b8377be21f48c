/* Launches prepared kernels on the tensors of a call, with little host time. backends/front_door.py describes the arguments.

   A launcher handles only the usual case. It hands every other call to the Python function `careful`, which computes the same. */
#pragma once

#include "c_step.h"
#include "python.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Dtype.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace onepass {

using Integers = std::vector<int64_t>;

inline Integers integers(const pybind11::handle& values) {
  return values.cast<Integers>();
}

// A tensor that a call passes, and what it must be like.
struct Input {
  Py_ssize_t argument;
  bool contiguous;
  std::optional<Integers> stride, shape;
  std::optional<at::ScalarType> dtype;

  explicit Input(const pybind11::tuple& given)
      : argument(given[0].cast<Py_ssize_t>()), contiguous(given[1].cast<bool>()) {
    if (!given[2].is_none()) {
      stride = integers(given[2]);
    }
    if (!given[3].is_none()) {
      shape = integers(given[3]);
    }
    if (!given[4].is_none()) {
      TORCH_CHECK_TYPE(THPDtype_Check(given[4].ptr()), "expected a dtype");
      dtype = reinterpret_cast<THPDtype*>(given[4].ptr())->scalar_type;
    }
  }

  bool fits(const at::Tensor& t, const at::Device& device) const {
    return t.device() == device && !(contiguous && !t.is_contiguous()) && !(stride && t.strides() != *stride) &&
        !(shape && t.sizes() != *shape) && !(dtype && t.scalar_type() != *dtype);
  }
};

// A tensor that each call allocates.
struct Output {
  Integers shape, stride;
  at::ScalarType dtype;
  std::vector<object> description;  // the arguments of the Python function `allocate`

  explicit Output(const pybind11::tuple& given)
      : shape(integers(given[0])), stride(integers(given[1])), description(given.cast<std::vector<object>>()) {
    TORCH_CHECK_TYPE(THPDtype_Check(given[2].ptr()), "expected a dtype");
    dtype = reinterpret_cast<THPDtype*>(given[2].ptr())->scalar_type;
  }
};

using Given = c10::SmallVector<const at::Tensor*, 10>;  // the inputs of a call

// An argument of a step: a constant, an address, the stream, a descriptor of an input, or a tuple of arguments.
struct Argument {
  enum Kind { CONSTANT, ADDRESS, STREAM, DESCRIPTOR, TUPLE } kind;
  object constant;
  Address address{-1, 0};
  std::vector<Argument> parts;
  size_t input = 0;  // the number of the input that a descriptor is for

  static Argument of(const pybind11::handle& given) {
    const auto pair = given.cast<pybind11::tuple>();
    Argument made{static_cast<Kind>(pair[0].cast<int>()), {}, {-1, 0}, {}, 0};
    if (made.kind == ADDRESS) {
      made.address = Address::of(pair[1]);
    } else if (made.kind == TUPLE) {
      for (const auto& part : pair[1].cast<pybind11::tuple>()) {
        made.parts.push_back(of(part));
      }
    } else if (made.kind == DESCRIPTOR) {
      const auto described = pair[1].cast<pybind11::tuple>();
      made.input = described[0].cast<size_t>();
      made.constant = reinterpret_borrow<object>(described[1]);
    } else {
      made.constant = reinterpret_borrow<object>(pair[1]);
    }
    return made;
  }

  object value(const Addresses& addresses, const object& stream, const Given& given) const {
    switch (kind) {
      case CONSTANT:
        return constant;
      case ADDRESS:
        return own(PyLong_FromUnsignedLongLong(address.in(addresses)));
      case STREAM:
        return stream;
      case DESCRIPTOR:
        return own(PyObject_CallOneArg(constant.ptr(), own(THPVariable_Wrap(*given[input])).ptr()));
      default: {
        object made = own(PyTuple_New(static_cast<Py_ssize_t>(parts.size())));
        for (size_t i = 0; i < parts.size(); ++i) {
          PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i), parts[i].value(addresses, stream, given).release().ptr());
        }
        return made;
      }
    }
  }
};

// A call of a Python function, which launches a GPU kernel.
struct PythonStep {
  object function;
  std::vector<Argument> arguments;
};

using Made = c10::SmallVector<at::Tensor, 8>;

struct Launcher {
  object careful;
  at::Device device{at::kCPU};
  Py_ssize_t number = 0;  // of arguments
  uintptr_t lowest = 0, alignment = 1;
  std::vector<Input> inputs;
  object allocate;  // a Python function
  c10::Allocator* allocator = nullptr;  // the one that it uses
  std::vector<Output> outputs;
  object stream_of, device_number;  // functions and arguments for the stream and the counters of a GPU
  object counters_of;
  std::vector<PythonStep> python_steps;
  std::optional<CStep> c_step;
  std::vector<Py_ssize_t> changed;  // arguments that the kernels change
  std::vector<Py_ssize_t> returned;  // outputs; -1 is None
  bool returns_tuple = false;

  at::Tensor make(const Output& output) const {
    if (!allocator || at::globalContext().deterministicAlgorithms()) {  // in that mode, torch fills new tensors
      return tensor_or_undefined(call(allocate.ptr(), output.description).ptr());
    }
    const c10::DispatchKeySet keys(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
    return at::Tensor(at::detail::empty_strided_generic(output.shape, output.stride, allocator, keys, output.dtype));
  }

  // Run the steps on the inputs in `given`, and add the outputs to `made`. Return false, and do nothing, if the call is unusual.
  // `arguments` are those of a call from Python. Only steps that need a momentum read them.
  bool run(const Given& given, PyObject* const* arguments, Made& made) const {
    if (device.is_cuda() && c10::impl::VirtualGuardImpl(device.type()).getDevice() != device) {
      return false;
    }
    Addresses addresses;
    uintptr_t bits = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const at::Tensor& t = *given[i];
      if (!t.defined() || !inputs[i].fits(t, device)) {
        return false;
      }
      const auto at = reinterpret_cast<uintptr_t>(t.data_ptr());
      if (at < lowest) {
        return false;
      }
      bits |= at;
      addresses.push_back(at);
    }
    object stream;
    if (!stream_of.is_none()) {
      stream = own(PyObject_CallOneArg(stream_of.ptr(), device_number.ptr()));
    }
    for (const auto& output : outputs) {
      made.push_back(make(output));
    }
    if (!counters_of.is_none()) {
      made.push_back(tensor_or_undefined(call(counters_of.ptr(), std::vector<object>{device_number, stream}).ptr()));
    }
    for (const auto& t : made) {
      const auto at = reinterpret_cast<uintptr_t>(t.data_ptr());
      bits |= at;
      addresses.push_back(at);
    }
    if (bits % alignment || (c_step && !c_step->run(addresses, arguments))) {
      return false;
    }
    for (const auto& step : python_steps) {
      c10::SmallVector<object, 32> values;
      for (const auto& argument : step.arguments) {
        values.push_back(argument.value(addresses, stream, given));
      }
      call(step.function.ptr(), values);
    }
    return true;
  }

  // As above, on the arguments of a call from Python.
  bool run(PyObject* const* arguments, Made& made) const {
    Given given;
    for (const auto& input : inputs) {
      PyObject* one = arguments[input.argument];
      if (!THPVariable_Check(one)) {
        return false;
      }
      given.push_back(&THPVariable_Unpack(one));
    }
    return run(given, arguments, made);
  }

  // A call from Python.
  object launch(PyObject* const* arguments) const {
    Made made;
    if (!run(arguments, made)) {
      return own(PyObject_Vectorcall(careful.ptr(), arguments, number, nullptr));
    }
    for (const auto argument : changed) {
      THPVariable_Unpack(arguments[argument]).unsafeGetTensorImpl()->bump_version();
    }
    if (!returns_tuple) {
      return own(THPVariable_Wrap(made[returned[0]]));
    }
    object found = own(PyTuple_New(static_cast<Py_ssize_t>(returned.size())));
    for (size_t i = 0; i < returned.size(); ++i) {
      object value = returned[i] < 0 ? object(pybind11::none()) : own(THPVariable_Wrap(made[returned[i]]));
      PyTuple_SET_ITEM(found.ptr(), static_cast<Py_ssize_t>(i), value.release().ptr());
    }
    return found;
  }
};

constexpr const char* LAUNCHER = "onepass.launcher";

inline PyObject* launch(PyObject* capsule, PyObject* const* arguments, Py_ssize_t number) {
  HANDLE_TH_ERRORS
  const auto* launcher = static_cast<const Launcher*>(PyCapsule_GetPointer(capsule, LAUNCHER));
  TORCH_CHECK_TYPE(number == launcher->number, "expected ", launcher->number, " arguments, got ", number);
  return launcher->launch(arguments).release().ptr();
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef launch_method = {"launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(launch)), METH_FASTCALL, nullptr};

// launcher(description) -> function. The description is a dictionary.
inline PyObject* launcher(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const auto from = reinterpret_borrow<pybind11::dict>(given);
  auto made = std::make_unique<Launcher>();
  made->careful = from["careful"];
  const auto index = from["device"].cast<int>();
  made->device = index < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  made->device_number = from["device"];
  made->number = from["number"].cast<Py_ssize_t>();
  made->lowest = from["lowest"].cast<uintptr_t>();
  made->alignment = from["alignment"].cast<uintptr_t>();
  for (const auto& input : from["inputs"].cast<pybind11::tuple>()) {
    made->inputs.emplace_back(input.cast<pybind11::tuple>());
  }
  made->allocate = from["allocate"];
  for (const auto& output : from["outputs"].cast<pybind11::tuple>()) {
    made->outputs.emplace_back(output.cast<pybind11::tuple>());
  }
  if (!made->outputs.empty()) {
    const object one = call(made->allocate.ptr(), made->outputs[0].description);
    made->allocator = tensor_or_undefined(one.ptr()).storage().allocator();
  }
  made->stream_of = from["stream_of"];
  made->counters_of = from["counters_of"];
  for (const auto& step : from["steps"].cast<pybind11::tuple>()) {
    const auto pair = step.cast<pybind11::tuple>();
    PythonStep one{pair[0], {}};
    for (const auto& argument : pair[1].cast<pybind11::tuple>()) {
      one.arguments.push_back(Argument::of(argument));
    }
    made->python_steps.push_back(std::move(one));
  }
  if (!from["c"].is_none()) {
    made->c_step = CStep::of(from["c"].cast<pybind11::dict>());
  }
  made->changed = from["changed"].cast<std::vector<Py_ssize_t>>();
  made->returns_tuple = PyTuple_Check(from["returned"].cast<object>().ptr());
  if (made->returns_tuple) {
    made->returned = from["returned"].cast<std::vector<Py_ssize_t>>();
  } else {
    made->returned = {from["returned"].cast<Py_ssize_t>()};
  }
  object capsule = own(PyCapsule_New(made.release(), LAUNCHER, [](PyObject* dead) {
    delete static_cast<Launcher*>(PyCapsule_GetPointer(dead, LAUNCHER));
  }));
  return PyCFunction_New(&launch_method, capsule.ptr());
  END_HANDLE_TH_ERRORS
}

// The Launcher behind a Python function, or NULL if the function is something else.
inline const Launcher* launcher_in(PyObject* function) {
  PyObject* capsule = PyCFunction_Check(function) ? PyCFunction_GET_SELF(function) : nullptr;
  const bool ours = capsule && PyCapsule_IsValid(capsule, LAUNCHER);
  return ours ? static_cast<const Launcher*>(PyCapsule_GetPointer(capsule, LAUNCHER)) : nullptr;
}

}  // namespace onepass
