/* A Python module for the two places where Python itself takes longer than a small norm: the graph of autograd, and a launch. */

#include "launcher.h"
#include "node.h"
#include "trained.h"

namespace {

PyMethodDef methods[] = {
    {"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(onepass::apply)), METH_FASTCALL, nullptr},
    {"launcher", onepass::launcher, METH_O, nullptr},
    {"memory", onepass::memory, METH_NOARGS, nullptr},
    {"remember", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(onepass::remember)), METH_FASTCALL, nullptr},
    {"trained", onepass::trained, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "onepass_front_door", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

extern "C" __attribute__((visibility("default"))) PyObject* onepass_front_door() {
  PyObject* module = PyModule_Create(&definition);
  if (module && PyModule_AddObjectRef(module, "node_type", onepass::node_type()) < 0) {
    Py_CLEAR(module);
  }
  return module;
}
