// A function of torch's kind: it calls an allocating function and lets torch turn what is thrown into a Python error.
#include <Python.h>
#include <torch/csrc/Exceptions.h>

static PyObject* call(PyObject*, PyObject* arguments) {
  HANDLE_TH_ERRORS
  unsigned long long address = 0, bytes = 0;
  int device = 0;
  if (!PyArg_ParseTuple(arguments, "KKi", &address, &bytes, &device)) return nullptr;
  auto allocate = reinterpret_cast<void* (*)(size_t, int, void*)>(address);
  return PyLong_FromVoidPtr(allocate(bytes, device, nullptr));
  END_HANDLE_TH_ERRORS
}

static PyMethodDef methods[] = {{"call", call, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "boundary", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_boundary() { return PyModule_Create(&module); }
