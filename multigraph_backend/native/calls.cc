// What a replayed call does most often, without Python between its steps: whether what it changes is its own, the way to
// its recording, which outputs are still alive, whether a recording may be replayed, the copies of its inputs with its
// launch, and the tensors that it hands out.
//
// Each does what the Python beside it does, in the same order, and decides nothing (`recordings/replay.py`,
// `recordings/nodes.py` and `capture/aliasing.py` say what). Where something is not as it was when the object was made,
// it answers as Python would, or leaves the call to Python. Compiled against the headers of the torch that it is loaded
// into, and without CUDA's: the driver is looked up by name, the current stream is asked by way of DLPack's table of
// functions.

#include <ATen/core/Tensor.h>
#include <ATen/dlpack.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include <dlfcn.h>
#include <structmember.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

// ---------------------------------------------------------------- what Python's objects hold

// Where `Slot` and `Node` keep what is read here: offsets of their `__slots__`.
struct Places {
  PyTypeObject* slot = nullptr;
  PyTypeObject* node = nullptr;
  Py_ssize_t handle = 0, storage = 0, base = 0, refs = 0, kept = 0, kept_refs = 0, address = 0;  // of a slot
  Py_ssize_t watched = 0, children = 0, ready = 0, holds = 0, run = 0;                             // of a node
  int64_t uses = 0;  // by how much torch's count of a storage's uses is above the one of its headers
  int64_t references = 0;  // and `sys.getrefcount` of an attribute above the object's own
};
Places places;

PyObject* held(PyObject* object, Py_ssize_t at) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + at);
}

// `*error` is set, with an exception, where it is no number.
int64_t number(PyObject* object, Py_ssize_t at, bool* error) {
  PyObject* value = held(object, at);
  if (value == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "a slot that was not made ready");
    *error = true;
    return 0;
  }
  const int64_t found = PyLong_AsLongLong(value);
  if (found == -1 && PyErr_Occurred()) *error = true;
  return found;
}

int64_t references(PyObject* object) {
  return static_cast<int64_t>(Py_REFCNT(object)) + places.references;
}

int64_t uses(int64_t handle) {
  return static_cast<int64_t>(c10::raw::intrusive_ptr::use_count(reinterpret_cast<c10::StorageImpl*>(handle))) +
      places.uses;
}

// 1: as `Slot.alive`; -1 with an exception. What is no slot stands for what never dies.
int alive(PyObject* slot) {
  if (!PyObject_TypeCheck(slot, places.slot)) return 1;
  bool error = false;
  const int64_t handle = number(slot, places.handle, &error), base = number(slot, places.base, &error);
  const int64_t refs = number(slot, places.refs, &error), kept_refs = number(slot, places.kept_refs, &error);
  PyObject *storage = held(slot, places.storage), *kept = held(slot, places.kept);
  if (error || storage == nullptr || kept == nullptr) return -1;
  return uses(handle) > base || references(storage) > refs || references(kept) > kept_refs;
}

bool is_tensor(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

uint64_t address(PyObject* tensor) {
  return reinterpret_cast<uint64_t>(THPVariable_Unpack(tensor).unsafeGetTensorImpl()->data());
}

// Whether a tensor's bytes are its values: not where it is marked as conjugate or negative.
bool is_bytes(PyObject* tensor) {
  const at::Tensor& found = THPVariable_Unpack(tensor);
  return !found.is_conj() && !found.is_neg();
}

uint64_t begin_of(int64_t handle) {
  return reinterpret_cast<uint64_t>(reinterpret_cast<c10::StorageImpl*>(handle)->data());
}

// A position among inputs, out of a Python number.
bool position(PyObject* value, Py_ssize_t* found) {
  *found = PyLong_AsSsize_t(value);
  if (*found < 0 && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a position is not negative");
  return *found >= 0;
}

bool positions(PyObject* values, std::vector<Py_ssize_t>* found) {
  PyObject* fast = PySequence_Fast(values, "positions are a sequence");
  if (fast == nullptr) return false;
  bool right = true;
  for (Py_ssize_t at = 0; right && at < PySequence_Fast_GET_SIZE(fast); at++) {
    Py_ssize_t index = 0;
    right = position(PySequence_Fast_GET_ITEM(fast, at), &index);
    if (right) found->push_back(index);
  }
  Py_DECREF(fast);
  return right;
}

// ---------------------------------------------------------------- the end of the path

// Takes off `path`, a list of nodes, what has nothing alive at its end.
PyObject* shorten(PyObject*, PyObject* path) {
  if (!PyList_CheckExact(path)) {
    PyErr_SetString(PyExc_TypeError, "a path is a list");
    return nullptr;
  }
  while (PyList_GET_SIZE(path) > 0) {
    const Py_ssize_t size = PyList_GET_SIZE(path);
    PyObject* node = PyList_GET_ITEM(path, size - 1);
    PyObject* watched = PyObject_TypeCheck(node, places.node) ? held(node, places.watched) : nullptr;
    if (watched == nullptr || !PyTuple_CheckExact(watched)) {
      PyErr_SetString(PyExc_TypeError, "a path has nodes, which watch tuples of slots");
      return nullptr;
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(watched); at++) {
      const int lives = alive(PyTuple_GET_ITEM(watched, at));
      if (lives < 0) return nullptr;
      if (lives) Py_RETURN_NONE;
    }
    if (PyList_SetSlice(path, size - 1, size, nullptr) < 0) return nullptr;
  }
  Py_RETURN_NONE;
}

// ---------------------------------------------------------------- whether a recording may be replayed

struct Fixed {
  Py_ssize_t index;
  uint64_t address;
};

struct Same {
  Py_ssize_t index;
  PyObject* object;
};

struct Consumed {
  PyObject* slot;
  int64_t count;
  std::vector<Py_ssize_t> indices;
};

struct HoldsState {
  Py_ssize_t least = 0;  // inputs that there have to be
  std::vector<Fixed> fixed;
  std::vector<Same> same;
  std::vector<PyObject*> dead, slots, constants, checks;
  std::vector<uint64_t> constants_at;
  std::vector<Consumed> consumed;
  PyObject *kept = nullptr, *kept_at = nullptr, *shown = nullptr;
};

struct Holds {
  PyObject_HEAD
  vectorcallfunc call;
  HoldsState* state;
};

// 1 and 0, -1 with an exception.
int consumed_are_free(const HoldsState& state, PyObject* inputs) {
  for (const Consumed& one : state.consumed) {
    bool error = false;
    PyObject* kept = held(one.slot, places.kept);
    const int64_t handle = number(one.slot, places.handle, &error), base = number(one.slot, places.base, &error);
    const int64_t kept_refs = number(one.slot, places.kept_refs, &error);
    if (error || kept == nullptr) return -1;
    int64_t own = 0;
    for (const Py_ssize_t index : one.indices) {
      PyObject* input = PyList_GET_ITEM(inputs, index);
      if (input == kept) {
        own++;
      } else if (Py_REFCNT(input) > 1) {  // the list
        return 0;
      }
    }
    if (uses(handle) > base + one.count - own || references(kept) > kept_refs + own) return 0;
  }
  return 1;
}

int kept_lie(const HoldsState& state) {
  if (state.kept == nullptr) return 1;
  const Py_ssize_t size = PyList_GET_SIZE(state.kept);
  if (PyList_GET_SIZE(state.kept_at) != size) return 0;
  for (Py_ssize_t at = 0; at < size; at++) {
    const uint64_t expected = PyLong_AsUnsignedLongLong(PyList_GET_ITEM(state.kept_at, at));
    if (expected == static_cast<uint64_t>(-1) && PyErr_Occurred()) return -1;
    PyObject* tensor = PyList_GET_ITEM(state.kept, at);
    if (!is_tensor(tensor) || address(tensor) != expected) return 0;
  }
  return 1;
}

int lie(PyObject* slot) {
  bool error = false;
  const int64_t handle = number(slot, places.handle, &error), expected = number(slot, places.address, &error);
  if (error) return -1;
  return begin_of(handle) == static_cast<uint64_t>(expected);
}

int shown_lie(const HoldsState& state) {
  if (state.shown == nullptr) return 1;
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(state.shown); at++) {
    PyObject* slot = PyList_GET_ITEM(state.shown, at);
    if (!PyObject_TypeCheck(slot, places.slot)) return 0;
    if (const int right = lie(slot); right != 1) return right;
  }
  return 1;
}

int may_replay(const HoldsState& state, PyObject* inputs) {
  for (const Fixed& one : state.fixed) {
    PyObject* input = PyList_GET_ITEM(inputs, one.index);
    if (!is_tensor(input) || address(input) != one.address || !is_bytes(input)) return 0;
  }
  for (const Same& one : state.same) {
    if (PyList_GET_ITEM(inputs, one.index) != one.object) return 0;
  }
  for (PyObject* slot : state.dead) {
    if (const int lives = alive(slot); lives != 0) return lives < 0 ? -1 : 0;
  }
  if (const int free = consumed_are_free(state, inputs); free != 1) return free;
  if (const int right = kept_lie(state); right != 1) return right;
  if (const int right = shown_lie(state); right != 1) return right;
  for (PyObject* slot : state.slots) {
    if (const int right = lie(slot); right != 1) return right;
  }
  for (size_t at = 0; at < state.constants.size(); at++) {
    const auto begin = reinterpret_cast<uint64_t>(THPStorage_Unpack(state.constants[at]).data());
    if (begin != state.constants_at[at]) return 0;
  }
  for (PyObject* check : state.checks) {
    PyObject* answer = PyObject_CallOneArg(check, inputs);
    if (answer == nullptr) return -1;
    const int right = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    if (right != 1) return right;
  }
  return 1;
}

PyObject* holds_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  HANDLE_TH_ERRORS
  const HoldsState& state = *reinterpret_cast<Holds*>(self)->state;
  if (PyVectorcall_NARGS(nargsf) != 1 || names != nullptr || !PyList_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "whether a recording may be replayed is asked with the list of inputs");
    return nullptr;
  }
  if (PyList_GET_SIZE(args[0]) < state.least) Py_RETURN_FALSE;
  const int answer = may_replay(state, args[0]);
  if (answer < 0) return nullptr;
  return PyBool_FromLong(answer);
  END_HANDLE_TH_ERRORS
}

void holds_dealloc(PyObject* self) {
  auto* holds = reinterpret_cast<Holds*>(self);
  if (HoldsState* state = holds->state) {
    holds->state = nullptr;
    for (const Same& one : state->same) Py_DECREF(one.object);
    for (const Consumed& one : state->consumed) Py_DECREF(one.slot);
    for (const auto* all : {&state->dead, &state->slots, &state->constants, &state->checks}) {
      for (PyObject* one : *all) Py_DECREF(one);
    }
    Py_XDECREF(state->kept);
    Py_XDECREF(state->kept_at);
    Py_XDECREF(state->shown);
    delete state;
  }
  Py_TYPE(self)->tp_free(self);
}

bool taken(PyObject* values, PyTypeObject* type, const char* what, std::vector<PyObject*>* found) {
  PyObject* fast = PySequence_Fast(values, what);
  if (fast == nullptr) return false;
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(fast); at++) {
    PyObject* value = PySequence_Fast_GET_ITEM(fast, at);
    if (type != nullptr && !PyObject_TypeCheck(value, type)) {
      PyErr_SetString(PyExc_TypeError, what);
      Py_DECREF(fast);
      return false;
    }
    found->push_back(Py_NewRef(value));
  }
  Py_DECREF(fast);
  return true;
}

// fixed: pairs of a position and an address; same: of a position and the object that is to be there; consumed: of a slot,
// a count and positions; constants: of a storage and an address; checks: functions of the inputs, asked last
PyObject* holds_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  static const char* words[] = {"fixed", "same", "dead", "consumed", "kept", "kept_at", "shown", "slots", "constants",
                                "checks", nullptr};
  PyObject *fixed, *same, *dead, *consumed, *kept, *kept_at, *shown, *slots, *constants, *checks;
  if (!PyArg_ParseTupleAndKeywords(args, names, "O!O!OO!OOOOO!O", const_cast<char**>(words), &PyTuple_Type, &fixed,
                                   &PyTuple_Type, &same, &dead, &PyTuple_Type, &consumed, &kept, &kept_at, &shown,
                                   &slots, &PyTuple_Type, &constants, &checks)) {
    return nullptr;
  }
  if (places.slot == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "`measure` comes first");
    return nullptr;
  }
  auto* self = reinterpret_cast<Holds*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->call = holds_call;
  auto* state = self->state = new HoldsState;
  const auto failed = [self]() -> PyObject* {
    Py_DECREF(self);
    return nullptr;
  };
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(fixed); at++) {
    Py_ssize_t index;
    unsigned long long begin;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(fixed, at), "nK", &index, &begin)) return failed();
    state->fixed.push_back({index, begin});
    state->least = std::max(state->least, index + 1);
  }
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(same); at++) {
    Py_ssize_t index;
    PyObject* object;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(same, at), "nO", &index, &object)) return failed();
    state->same.push_back({index, Py_NewRef(object)});
    state->least = std::max(state->least, index + 1);
  }
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(consumed); at++) {
    PyObject *slot, *indices;
    long long count;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(consumed, at), "O!LO", places.slot, &slot, &count, &indices)) return failed();
    state->consumed.push_back({Py_NewRef(slot), count, {}});
    if (!positions(indices, &state->consumed.back().indices)) return failed();
    for (const Py_ssize_t index : state->consumed.back().indices) state->least = std::max(state->least, index + 1);
  }
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(constants); at++) {
    PyObject* storage;
    unsigned long long begin;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(constants, at), "OK", &storage, &begin)) return failed();
    state->constants.push_back(Py_NewRef(storage));
    state->constants_at.push_back(begin);
  }
  if (!taken(dead, places.slot, "what is to be dead are slots", &state->dead) ||
      !taken(slots, places.slot, "what is handed out are slots", &state->slots) ||
      !taken(checks, nullptr, "checks are a sequence", &state->checks)) {
    return failed();
  }
  if (kept != Py_None) {
    if (!PyList_CheckExact(kept) || !PyList_CheckExact(kept_at) || !PyList_CheckExact(shown)) {
      PyErr_SetString(PyExc_TypeError, "what is kept, and what users have come to see, are lists");
      return failed();
    }
    state->kept = Py_NewRef(kept);
    state->kept_at = Py_NewRef(kept_at);
    state->shown = Py_NewRef(shown);
  }
  return reinterpret_cast<PyObject*>(self);
}

PyTypeObject HoldsType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// ---------------------------------------------------------------- whether what a call changes is its own

struct AloneState {
  Py_ssize_t least = 0;
  std::vector<Py_ssize_t> written, others;
  std::vector<PyObject*> written_held, other_held;
};

struct Alone {
  PyObject_HEAD
  vectorcallfunc call;
  AloneState* state;
};

c10::StorageImpl* storage_of(PyObject* tensor) {
  return THPVariable_Unpack(tensor).unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// 1 and 0; -1 where it cannot be told here.
int is_alone(const AloneState& state, PyObject* args) {
  std::vector<PyObject*> changing;
  std::vector<c10::StorageImpl*> keys, shared;
  changing.reserve(state.written.size() + state.written_held.size());
  keys.reserve(changing.capacity());
  for (const Py_ssize_t at : state.written) changing.push_back(PySequence_Fast_GET_ITEM(args, at));
  changing.insert(changing.end(), state.written_held.begin(), state.written_held.end());
  for (PyObject* tensor : changing) {
    if (!is_tensor(tensor)) return -1;
    c10::StorageImpl* key = storage_of(tensor);
    if (key == nullptr) return -1;
    keys.push_back(key);
    if (c10::raw::intrusive_ptr::use_count(key) > 1) shared.push_back(key);
  }
  std::sort(changing.begin(), changing.end());
  std::sort(keys.begin(), keys.end());
  std::sort(shared.begin(), shared.end());
  if (std::adjacent_find(keys.begin(), keys.end()) != keys.end()) return 0;
  const auto reads = [&](PyObject* tensor) {  // what a call changes, by this tensor or another over the same memory
    if (std::binary_search(changing.begin(), changing.end(), tensor)) return 1;
    if (shared.empty()) return 0;
    if (!is_tensor(tensor)) return -1;
    c10::StorageImpl* key = storage_of(tensor);
    return key == nullptr ? -1 : static_cast<int>(std::binary_search(shared.begin(), shared.end(), key));
  };
  for (const Py_ssize_t at : state.others) {
    if (const int found = reads(PySequence_Fast_GET_ITEM(args, at)); found != 0) return found < 0 ? -1 : 0;
  }
  for (PyObject* tensor : state.other_held) {
    if (const int found = reads(tensor); found != 0) return found < 0 ? -1 : 0;
  }
  return 1;
}

PyObject* alone_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  HANDLE_TH_ERRORS
  const AloneState& state = *reinterpret_cast<Alone*>(self)->state;
  if (PyVectorcall_NARGS(nargsf) != 1 || names != nullptr || !(PyTuple_Check(args[0]) || PyList_Check(args[0])) ||
      PySequence_Fast_GET_SIZE(args[0]) < state.least) {
    PyErr_SetString(PyExc_TypeError, "whether what a call changes is its own is asked with all of its arguments");
    return nullptr;
  }
  const int answer = is_alone(state, args[0]);
  if (answer >= 0) return PyBool_FromLong(answer);
  PyErr_SetString(PyExc_TypeError, "a call has tensors with memory where it had them when it was compiled");
  return nullptr;
  END_HANDLE_TH_ERRORS
}

// A tensor that it holds may lead back to it, by what users hang on to tensors: so it takes part in garbage collections.
int alone_traverse(PyObject* self, visitproc visit, void* arg) {
  if (const AloneState* state = reinterpret_cast<Alone*>(self)->state) {
    for (PyObject* one : state->written_held) Py_VISIT(one);
    for (PyObject* one : state->other_held) Py_VISIT(one);
  }
  return 0;
}

int alone_clear(PyObject* self) {
  if (AloneState* state = reinterpret_cast<Alone*>(self)->state) {
    std::vector<PyObject*> gone;
    gone.swap(state->written_held);
    gone.insert(gone.end(), state->other_held.begin(), state->other_held.end());
    state->other_held.clear();
    for (PyObject* one : gone) Py_DECREF(one);
  }
  return 0;
}

void alone_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  alone_clear(self);
  delete reinterpret_cast<Alone*>(self)->state;
  Py_TYPE(self)->tp_free(self);
}

// written, others: positions of arguments; written_held, other_held: tensors that take part beside them
PyObject* alone_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  static const char* words[] = {"written", "others", "written_held", "other_held", nullptr};
  PyObject *written, *others, *written_held, *other_held;
  if (!PyArg_ParseTupleAndKeywords(args, names, "OOOO", const_cast<char**>(words), &written, &others, &written_held,
                                   &other_held)) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Alone*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->call = alone_call;
  auto* state = self->state = new AloneState;
  auto* tensor = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  if (!positions(written, &state->written) || !positions(others, &state->others) ||
      !taken(written_held, tensor, "what takes part are tensors", &state->written_held) ||
      !taken(other_held, tensor, "what takes part are tensors", &state->other_held)) {
    Py_DECREF(self);
    return nullptr;
  }
  for (const auto* all : {&state->written, &state->others}) {
    for (const Py_ssize_t at : *all) state->least = std::max(state->least, at + 1);
  }
  return reinterpret_cast<PyObject*>(self);
}

PyTypeObject AloneType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// ---------------------------------------------------------------- tensors over storages

struct MakerState {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;
  PyObject* storage = nullptr;  // the one it is for; else each call names it
};

struct Maker {
  PyObject_HEAD
  vectorcallfunc call;
  MakerState* state;
};

PyObject* maker_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  HANDLE_TH_ERRORS
  const MakerState& state = *reinterpret_cast<Maker*>(self)->state;
  const Py_ssize_t given = PyVectorcall_NARGS(nargsf);
  PyObject* over = state.storage != nullptr ? state.storage : given == 1 ? args[0] : nullptr;
  if (names != nullptr || over == nullptr || given != (state.storage == nullptr) || !THPStorage_Check(over)) {
    PyErr_SetString(PyExc_TypeError, "a tensor is made over one storage");
    return nullptr;
  }
  c10::Storage storage = THPStorage_Unpack(over);
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), state.keys, state.dtype);
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(state.sizes, state.strides);
  impl->set_storage_offset(state.offset);
  return THPVariable_Wrap(std::move(made));
  END_HANDLE_TH_ERRORS
}

void maker_dealloc(PyObject* self) {
  auto* maker = reinterpret_cast<Maker*>(self);
  if (MakerState* state = maker->state) {
    maker->state = nullptr;
    Py_XDECREF(state->storage);
    delete state;
  }
  Py_TYPE(self)->tp_free(self);
}

// like: a plain tensor of the layout that is wanted; storage: the one it is for, or None
PyObject* maker_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  HANDLE_TH_ERRORS
  static const char* words[] = {"like", "storage", nullptr};
  PyObject *like, *storage;
  if (!PyArg_ParseTupleAndKeywords(args, names, "OO", const_cast<char**>(words), &like, &storage)) return nullptr;
  if (!is_tensor(like) || (storage != Py_None && !THPStorage_Check(storage))) {
    PyErr_SetString(PyExc_TypeError, "a tensor is made like one, over a storage");
    return nullptr;
  }
  const at::Tensor& model = THPVariable_Unpack(like);
  auto state = std::make_unique<MakerState>();
  state->sizes = model.sizes().vec();
  state->strides = model.strides().vec();
  state->offset = model.storage_offset();
  state->dtype = model.dtype();
  state->keys = c10::DispatchKeySet(
      c10::computeDispatchKey(model.scalar_type(), model.layout(), model.device()));
  auto* self = reinterpret_cast<Maker*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->call = maker_call;
  self->state = state.release();
  if (storage != Py_None) self->state->storage = Py_NewRef(storage);
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

PyTypeObject MakerType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// ---------------------------------------------------------------- copies and launch

using GraphLaunch = int (*)(void* graph, void* stream);
using KernelLaunch = int (*)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                             void* stream, void** parameters, void** extra);

// As the driver lays it out since CUDA 12.0.
struct NodeParameters {
  void* function;
  unsigned x, y, z, threads_x, threads_y, threads_z, shared;
  void **parameters, **extra;
  void *kernel, *context;
};
// A copy and a fill, as the driver lays them out.
struct CopyParameters {
  size_t source_x, source_y, source_z, source_level;
  int source_kind;
  const void* source_host;
  uint64_t source;
  void *source_array, *reserved;
  size_t source_pitch, source_height;
  size_t target_x, target_y, target_z, target_level;
  int target_kind;
  void* target_host;
  uint64_t target;
  void *target_array, *reserved_too;
  size_t target_pitch, target_height;
  size_t width, height, depth;
};
struct FillParameters {
  uint64_t target;
  size_t pitch;
  unsigned value, bytes;
  size_t width, height;
};
using SetParameters = int (*)(void* graph, void* node, const NodeParameters*);
using GraphNodes = int (*)(void* graph, void** nodes, size_t* count);
using KindOfNode = int (*)(void* node, int* kind);
using KernelOfNode = int (*)(void* node, NodeParameters*);
using CopyOfNode = int (*)(void* node, CopyParameters*);
using FillOfNode = int (*)(void* node, FillParameters*);
using ParameterInfo = int (*)(void* function, size_t index, size_t* at, size_t* size);
using CaptureInfo = int (*)(void* stream, int* status, uint64_t* id, void** graph, void*** nodes, const void** edges,
                            size_t* count);
using SetContext = int (*)(void* context);
using RetainContext = int (*)(void** context, int device);
constexpr int INVALID_VALUE = 1, INVALID_CONTEXT = 201;
constexpr int KERNEL_NODE = 0, COPY_NODE = 1, FILL_NODE = 2;

struct Driver {
  GraphLaunch graph = nullptr;
  KernelLaunch kernel = nullptr;
  // these may be missing: then nothing is copied within recordings
  SetParameters set = nullptr;
  CaptureInfo info = nullptr;
  RetainContext retain = nullptr;
  SetContext make_current = nullptr;
  // and without these no kernel is told where inputs lie
  GraphNodes nodes = nullptr;
  KindOfNode kind = nullptr;
  KernelOfNode kernel_of = nullptr;
  CopyOfNode copy_of = nullptr;
  FillOfNode fill_of = nullptr;
  ParameterInfo of_function = nullptr, of_kernel = nullptr;
};
Driver driver;
const DLPackExchangeAPI* exchange = nullptr;

// An input that kernels read where it lies, and the kernels that are told: `devices/patches.py` says what is proven first.
struct ToldInput {
  Py_ssize_t index;
  std::vector<int64_t> sizes, strides;
  caffe2::TypeMeta dtype;
  uint64_t span, aligned;
  uint64_t address = 0;  // what the words of `ToldNode` say, 0 at first
  uint64_t now = 0;      // in this call
  std::vector<std::pair<size_t, size_t>> words;  // numbers of a node, and of a word of its
};

struct ToldWord {
  size_t at;  // of the node's numbers
  uint64_t offset;
};

struct ToldNode {
  void* node;
  NodeParameters how;
  std::vector<uint64_t> numbers;  // its parameters, one after the other
  std::vector<void*> parameters;
  std::vector<ToldWord> words;
  bool told = false;  // whether the driver has been told what `numbers` say
};

struct Range {
  uint64_t begin, end;
};

struct LaunchState {
  void* graph = nullptr;
  std::vector<ToldInput> told_inputs;
  std::vector<ToldNode> told;
  std::vector<Range> written;  // what the graph changes of other memory than its own: sorted, apart from each other
  bool told_by_others = false;  // each call tells everything, for the driver may have been told other things meanwhile
  PyObject* otherwise = nullptr;  // copies and launches as torch does, and tells of errors
  PyObject* keeps = nullptr;
  int device = 0;
  // torch's launch of the graph, in place of the driver's: always, or where one of `hooks` has something in it
  PyObject *replay = nullptr, *hooks = nullptr;
  bool by_torch = false;
  // of the kernel that copies: in the graph, where it is a node of it; else it is launched before
  void* node = nullptr;
  void* function = nullptr;
  unsigned programs = 0, threads = 0, shared = 0;
  uint64_t table = 0, aligned = 0;
  size_t size = 0;
  std::vector<Py_ssize_t> indices;
};

struct Launch {
  PyObject_HEAD
  vectorcallfunc call;
  LaunchState* state;
};

constexpr size_t MOST_SOURCES = 64;

// Whether kernels may read an input where it lies: as it lay in the capture, and outside of what the graph changes.
bool may_be_read(const ToldInput& one, const std::vector<Range>& written, PyObject* input, uint64_t* begin) {
  if (!is_tensor(input)) return false;
  const at::Tensor& found = THPVariable_Unpack(input);
  if (found.layout() != at::kStrided || found.is_conj() || found.is_neg() || found.dtype() != one.dtype ||
      found.sizes() != c10::IntArrayRef(one.sizes) || found.strides() != c10::IntArrayRef(one.strides)) {
    return false;
  }
  const auto before = static_cast<uint64_t>(found.storage_offset()) * found.element_size();
  if (found.storage().nbytes() < before + one.span) return false;  // it was resized
  *begin = address(input);
  if (*begin == 0 || (*begin & (one.aligned - 1)) != 0) return false;
  const auto after = std::upper_bound(written.begin(), written.end(), *begin,
                                      [](uint64_t at, const Range& range) { return at < range.end; });
  return after == written.end() || after->begin >= *begin + one.span;
}

// Writes where inputs lie now among the parameters of the kernels that read them.
void write_down(LaunchState& state) {
  for (ToldInput& one : state.told_inputs) {
    if (one.now == one.address) continue;
    for (const auto& [number, word] : one.words) {
      ToldNode& node = state.told[number];
      node.told = false;
      node.numbers[node.words[word].at] = one.now + node.words[word].offset;
    }
    one.address = one.now;
  }
}

void tell_all_again(LaunchState& state) {
  for (ToldNode& node : state.told) node.told = false;
}

// What the driver answers; `by_torch`: torch is to launch the graph afterwards.
int launched(LaunchState& state, void* stream, void** parameters, bool by_torch) {
  int failed = 0;
  for (ToldNode& node : state.told) {
    if (node.told) continue;
    failed = driver.set(state.graph, node.node, &node.how);
    if (failed != 0) return failed;
    node.told = true;
  }
  if (state.node != nullptr) {
    const NodeParameters wanted = {state.function, state.programs, 1,       1,       state.threads, 1, 1,
                                   state.shared,   parameters,     nullptr, nullptr, nullptr};
    failed = driver.set(state.graph, state.node, &wanted);
  } else if (state.function != nullptr) {
    failed = driver.kernel(state.function, state.programs, 1, 1, state.threads, 1, 1, state.shared, stream, parameters,
                           nullptr);
  }
  return failed != 0 || by_torch ? failed : driver.graph(state.graph, stream);
}

// A thread that has asked nothing of the device yet has no context. It gets torch's, which lives as long as the process.
bool have_context(const LaunchState& state) {
  void* context = nullptr;
  return driver.retain != nullptr && driver.make_current != nullptr && driver.retain(&context, state.device) == 0 &&
      driver.make_current(context) == 0;
}

PyObject* launch_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  HANDLE_TH_ERRORS
  LaunchState& state = *reinterpret_cast<Launch*>(self)->state;
  if (PyVectorcall_NARGS(nargsf) != 1 || names != nullptr || !PyList_CheckExact(args[0])) {
    PyErr_SetString(PyExc_TypeError, "a recording is launched with the list of inputs");
    return nullptr;
  }
  PyObject* inputs = args[0];
  uint64_t table = state.table, nothing = 0;
  uint64_t sources[MOST_SOURCES];
  void* parameters[MOST_SOURCES + 4];
  bool right = true;
  if (state.function != nullptr) {
    size_t at = 0;
    uint64_t all = 0;
    for (const Py_ssize_t index : state.indices) {
      PyObject* input = index < PyList_GET_SIZE(inputs) ? PyList_GET_ITEM(inputs, index) : Py_None;
      right = right && is_tensor(input) && is_bytes(input);
      if (!right) break;
      all |= sources[at++] = address(input);
    }
    right = right && (all & (state.aligned - 1)) == 0;
    for (; at > 0 && at < state.size; at++) sources[at] = sources[0];
    size_t count = 0;
    parameters[count++] = &table;
    for (size_t one = 0; one < state.size; one++) parameters[count++] = &sources[one];
    while (count < state.size + 4) parameters[count++] = &nothing;  // what Triton passes beside what is written
  }
  for (ToldInput& one : state.told_inputs) {
    PyObject* input = one.index < PyList_GET_SIZE(inputs) ? PyList_GET_ITEM(inputs, one.index) : Py_None;
    right = right && may_be_read(one, state.written, input, &one.now);
    if (!right) break;
  }
  void* stream = nullptr;
  if (right && state.device >= 0) {
    right = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index() == state.device &&
        exchange->current_work_stream(kDLCUDA, state.device, &stream) == 0;
  }
  if (!right) PyErr_Clear();  // of who was asked for the stream: torch is asked next
  int by_torch = state.by_torch;
  for (Py_ssize_t at = 0; !by_torch && at < PyTuple_GET_SIZE(state.hooks); at++) {
    by_torch = PyObject_IsTrue(PyTuple_GET_ITEM(state.hooks, at));
    if (by_torch < 0) return nullptr;
  }
  int failed = 0;
  if (right) {
    if (state.told_by_others) tell_all_again(state);
    write_down(state);
    Py_BEGIN_ALLOW_THREADS;  // a launch waits where the device has enough to do
    failed = launched(state, stream, parameters, by_torch);
    if (failed == INVALID_CONTEXT && have_context(state)) failed = launched(state, stream, parameters, by_torch);
    Py_END_ALLOW_THREADS;
  }
  if (!right || failed != 0) {
    tell_all_again(state);  // after that the driver has been told what `otherwise` says
    return PyObject_CallOneArg(state.otherwise, inputs);
  }
  if (by_torch) return PyObject_CallNoArgs(state.replay);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

void launch_dealloc(PyObject* self) {
  auto* launch = reinterpret_cast<Launch*>(self);
  if (LaunchState* state = launch->state) {
    launch->state = nullptr;
    Py_XDECREF(state->otherwise);
    Py_XDECREF(state->replay);
    Py_XDECREF(state->hooks);
    Py_XDECREF(state->keeps);
    delete state;
  }
  Py_TYPE(self)->tp_free(self);
}

// An address, or a size, out of a Python number.
bool whole(PyObject* value, uint64_t* found) {
  *found = PyLong_AsUnsignedLongLong(value);
  return *found != static_cast<uint64_t>(-1) || !PyErr_Occurred();
}

// A kernel out of (handle, numbers of its launch, parameters as bytes, words of them), where each word is (parameter,
// byte, number of an input, offset).
bool told_node(PyObject* from, LaunchState* state) {
  unsigned long long handle, function, kernel, context;
  PyObject *values, *words;
  ToldNode made;
  if (!PyArg_ParseTuple(from, "K(KKKIIIIIII)O!O!", &handle, &function, &kernel, &context, &made.how.x, &made.how.y,
                        &made.how.z, &made.how.threads_x, &made.how.threads_y, &made.how.threads_z, &made.how.shared,
                        &PyTuple_Type, &values, &PyTuple_Type, &words)) {
    return false;
  }
  made.node = reinterpret_cast<void*>(handle);
  made.how.function = reinterpret_cast<void*>(function);
  made.how.kernel = reinterpret_cast<void*>(kernel);
  made.how.context = reinterpret_cast<void*>(context);
  made.how.extra = nullptr;
  std::vector<size_t> begins, sizes;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(values); at++) {
    char* bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(values, at), &bytes, &size) < 0) return false;
    begins.push_back(made.numbers.size());
    sizes.push_back(static_cast<size_t>(size));
    made.numbers.resize(made.numbers.size() + (static_cast<size_t>(size) + 7) / 8, 0);
    if (size > 0) std::memcpy(made.numbers.data() + begins.back(), bytes, static_cast<size_t>(size));
  }
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(words); at++) {
    Py_ssize_t parameter, byte, input;
    unsigned long long offset;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(words, at), "nnnK", &parameter, &byte, &input, &offset)) return false;
    if (parameter < 0 || parameter >= static_cast<Py_ssize_t>(begins.size()) || byte < 0 || byte % 8 != 0 ||
        static_cast<size_t>(byte) + 8 > sizes[parameter] || input < 0 ||
        input >= static_cast<Py_ssize_t>(state->told_inputs.size())) {
      PyErr_SetString(PyExc_ValueError, "a word of a kernel's parameters is inside of one, for an input that is read");
      return false;
    }
    state->told_inputs[input].words.emplace_back(state->told.size(), made.words.size());
    made.words.push_back({begins[parameter] + static_cast<size_t>(byte) / 8, offset});
  }
  state->told.push_back(std::move(made));
  ToldNode& node = state->told.back();  // from here on its numbers stay where they are
  for (const size_t begin : begins) node.parameters.push_back(node.numbers.data() + begin);
  node.how.parameters = node.parameters.data();
  return true;
}

// What is told to kernels: (inputs, nodes, ranges that are written, whether others tell them too), where an input is
// (position, a tensor that lies like it, bytes that it spans, alignment)
bool told(PyObject* from, LaunchState* state) {
  PyObject *inputs, *nodes, *written;
  int by_others;
  if (!PyArg_ParseTuple(from, "O!O!O!p", &PyTuple_Type, &inputs, &PyTuple_Type, &nodes, &PyTuple_Type, &written,
                        &by_others)) {
    return false;
  }
  if (driver.set == nullptr) {
    PyErr_SetString(PyExc_ValueError, "the driver does not set parameters of a graph's kernel");
    return false;
  }
  state->told_by_others = by_others != 0;
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(inputs); at++) {
    Py_ssize_t index;
    PyObject* like;
    unsigned long long span, aligned;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(inputs, at), "nOKK", &index, &like, &span, &aligned)) return false;
    if (index < 0 || !is_tensor(like) || span == 0 || aligned == 0 || (aligned & (aligned - 1)) != 0) {
      PyErr_SetString(PyExc_ValueError, "an input that is read where it lies is a tensor of some bytes, at a position");
      return false;
    }
    const at::Tensor& model = THPVariable_Unpack(like);
    state->told_inputs.push_back({index, model.sizes().vec(), model.strides().vec(), model.dtype(), span, aligned});
  }
  state->told.reserve(PyTuple_GET_SIZE(nodes));
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(nodes); at++) {
    if (!told_node(PyTuple_GET_ITEM(nodes, at), state)) return false;
  }
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(written); at++) {
    unsigned long long begin, end;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(written, at), "KK", &begin, &end)) return false;
    if (begin >= end || (!state->written.empty() && begin <= state->written.back().end)) {
      PyErr_SetString(PyExc_ValueError, "ranges that are written are sorted, and apart from each other");
      return false;
    }
    state->written.push_back({begin, end});
  }
  return true;
}

// graph: the driver's handle of what is launched; device: its number, -1 on the CPU; otherwise: a function of the inputs;
// copies: None, or (function, programs, threads, shared bytes, address of the table, alignment, size, positions, node of
// the graph or 0); replay: torch's function that launches; by_torch: whether it always does, and not only where one of
// `hooks`, a tuple, is true; keeps: what has to live as long; patches: what kernels are told, see `told`, or None
PyObject* launch_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  HANDLE_TH_ERRORS
  static const char* words[] = {"graph", "device", "otherwise", "copies", "replay", "by_torch", "hooks", "keeps",
                                "patches", nullptr};
  unsigned long long graph;
  int device, by_torch;
  PyObject *otherwise, *copies, *replay, *hooks, *keeps, *patches = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, names, "KiOOOpO!O|O", const_cast<char**>(words), &graph, &device, &otherwise,
                                   &copies, &replay, &by_torch, &PyTuple_Type, &hooks, &keeps, &patches)) {
    return nullptr;
  }
  if (driver.graph == nullptr || exchange == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "`drive` comes first");
    return nullptr;
  }
  auto* self = reinterpret_cast<Launch*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->call = launch_call;
  auto* state = self->state = new LaunchState;
  state->graph = reinterpret_cast<void*>(graph);
  state->device = device;
  state->otherwise = Py_NewRef(otherwise);
  state->keeps = Py_NewRef(keeps);
  state->replay = Py_NewRef(replay);
  state->hooks = Py_NewRef(hooks);
  state->by_torch = by_torch != 0;
  if (patches != Py_None && !told(patches, state)) {
    Py_DECREF(self);
    return nullptr;
  }
  if (copies == Py_None) return reinterpret_cast<PyObject*>(self);
  unsigned long long function, table, aligned, node;
  Py_ssize_t size;
  PyObject* indices;
  const bool right = PyArg_ParseTuple(copies, "KIIIKKnOK", &function, &state->programs, &state->threads, &state->shared,
                                      &table, &aligned, &size, &indices, &node) &&
      positions(indices, &state->indices);
  if (right && (size < 1 || size > static_cast<Py_ssize_t>(MOST_SOURCES) || state->indices.empty() ||
                static_cast<Py_ssize_t>(state->indices.size()) > size || aligned == 0)) {
    PyErr_SetString(PyExc_ValueError, "a kernel copies one source at least, and as many as it is compiled for at most");
  }
  if (right && function == 0) {
    PyErr_SetString(PyExc_ValueError, "what copies is a kernel");
  }
  if (right && node != 0 && driver.set == nullptr) {
    PyErr_SetString(PyExc_ValueError, "the driver does not set parameters of a graph's kernel");
  }
  if (PyErr_Occurred()) {
    Py_DECREF(self);
    return nullptr;
  }
  state->function = reinterpret_cast<void*>(function);
  state->table = table;
  state->node = reinterpret_cast<void*>(node);
  state->aligned = aligned;
  state->size = static_cast<size_t>(size);
  return reinterpret_cast<PyObject*>(self);
  END_HANDLE_TH_ERRORS
}

PyTypeObject LaunchType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// ---------------------------------------------------------------- the way of a call to its recording

// Names of what is read at each call, of objects that are Python's.
struct Names {
  PyObject *owner, *aside, *only, *keyed_for, *mark, *step_mark, *stream, *thread, *root;
};
Names attribute = {};

bool named() {
  const std::pair<const char*, PyObject**> wanted[] = {
      {"owner", &attribute.owner},
      {"aside", &attribute.aside},
      {"_only", &attribute.only},
      {"keyed_for", &attribute.keyed_for},
      {"mark_step_counter", &attribute.mark},
      {"step_mark", &attribute.step_mark},
      {"stream", &attribute.stream},
      {"thread", &attribute.thread},
      {"root", &attribute.root}};
  for (const auto& [name, at] : wanted) {
    if (*at == nullptr && (*at = PyUnicode_InternFromString(name)) == nullptr) return false;
  }
  return true;
}

struct EntryState {
  PyObject *piece = nullptr, *tree = nullptr, *turns = nullptr, *path = nullptr, *marks = nullptr;
  PyObject *capturing = nullptr, *stream = nullptr, *acquire = nullptr, *release = nullptr, *otherwise = nullptr;
  bool any_thread = false;
  std::vector<PyObject*> held;  // all of these; none once a garbage collection has found it unreachable
};

struct Entry {
  PyObject_HEAD
  vectorcallfunc call;
  EntryState* state;
};

// A reference that is let go of at the end of a block.
struct Owned {
  PyObject* object;
  explicit Owned(PyObject* made) : object(made) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object); }
};

// 1 and 0, -1 with an exception; lets go of what is given, which may be none, with an exception.
int truth(PyObject* value) {
  const Owned owned(value);
  return value == nullptr ? -1 : PyObject_IsTrue(value);
}

// Whether an attribute equals a value, of which this lets go.
int equals(PyObject* object, PyObject* name, PyObject* value) {
  const Owned other(value);
  if (value == nullptr) return -1;
  const Owned found(PyObject_GetAttr(object, name));
  return found.object == nullptr ? -1 : PyObject_RichCompareBool(found.object, value, Py_EQ);
}

// Whether an attribute is the number of this thread.
int is_own_thread(PyObject* object, PyObject* name) {
  return equals(object, name, PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
}

// Whether it is this thread's turn, as `turns` says.
int own_turn(const EntryState& state) {
  const Owned owner(PyObject_GetAttr(state.turns, attribute.owner));
  if (owner.object == nullptr) return -1;
  if (owner.object != Py_None) return is_own_thread(state.turns, attribute.owner);
  const int aside = truth(PyObject_GetAttr(state.turns, attribute.aside));
  return aside < 0 ? -1 : !aside;
}

// Whether step, stream and thread are those of the last call.
int goes_on(const EntryState& state) {
  if (const int same = equals(state.tree, attribute.step_mark, PyObject_GetAttr(state.marks, attribute.mark)); same != 1) return same;
  if (const int same = equals(state.tree, attribute.stream, PyObject_CallNoArgs(state.stream)); same != 1) return same;
  return state.any_thread ? 1 : is_own_thread(state.tree, attribute.thread);
}

// The recording that answered last behind the path's end, a new reference, if it may be replayed; null without an
// exception where Python has to look.
PyObject* found_for(const EntryState& state, PyObject* inputs) {
  if (own_turn(state) != 1) return nullptr;
  Owned keyed(PyObject_GetAttr(state.piece, attribute.only));
  if (keyed.object == Py_None) {
    Py_SETREF(keyed.object, PyObject_CallMethodOneArg(state.piece, attribute.keyed_for, inputs));
  }
  if (keyed.object == nullptr) return nullptr;
  if (PyList_GET_SIZE(state.path) > 0) {
    const Owned shortened(shorten(nullptr, state.path));
    if (shortened.object == nullptr) return nullptr;
  }
  if (goes_on(state) != 1) return nullptr;
  const Py_ssize_t size = PyList_GET_SIZE(state.path);
  const Owned last(size > 0 ? Py_NewRef(PyList_GET_ITEM(state.path, size - 1)) : PyObject_GetAttr(state.tree, attribute.root));
  if (last.object == nullptr || !PyObject_TypeCheck(last.object, places.node)) return nullptr;
  PyObject* children = held(last.object, places.children);
  if (children == nullptr || !PyDict_CheckExact(children)) return nullptr;
  PyObject* nodes = PyDict_GetItemWithError(children, keyed.object);
  if (nodes == nullptr || !PyList_CheckExact(nodes) || PyList_GET_SIZE(nodes) == 0) return nullptr;
  Owned node(Py_NewRef(PyList_GET_ITEM(nodes, 0)));
  if (!PyObject_TypeCheck(node.object, places.node) || held(node.object, places.ready) != Py_True) return nullptr;
  const Owned holds(Py_XNewRef(held(node.object, places.holds)));
  if (holds.object == nullptr || truth(PyObject_CallOneArg(holds.object, inputs)) != 1) return nullptr;
  return std::exchange(node.object, nullptr);
}

// The answer of a recording, null without an exception where Python has to look. The tree's lock is held.
PyObject* replayed(const EntryState& state, PyObject* inputs) {
  const Owned node(found_for(state, inputs));
  if (node.object == nullptr) return nullptr;
  const Owned run(Py_XNewRef(held(node.object, places.run)));
  if (run.object == nullptr) return nullptr;
  PyObject* given[] = {node.object, inputs};
  return PyObject_Vectorcall(run.object, given, 2, nullptr);
}

PyObject* entry_call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  HANDLE_TH_ERRORS
  const Owned itself(Py_NewRef(self));  // what runs may let go of it
  const EntryState& state = *reinterpret_cast<Entry*>(self)->state;
  if (PyVectorcall_NARGS(nargsf) != 1 || names != nullptr || !PyList_CheckExact(args[0]) || state.held.empty()) {
    PyErr_SetString(PyExc_TypeError, "a piece that is there is called with the list of its inputs");
    return nullptr;
  }
  PyObject* inputs = args[0];
  const int captures = truth(PyObject_CallNoArgs(state.capturing));
  if (captures < 0) return nullptr;
  if (!captures) {
    const Owned locked(PyObject_CallNoArgs(state.acquire));
    if (locked.object == nullptr) return nullptr;
    PyObject* outputs = replayed(state, inputs);
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const Owned released(PyObject_CallNoArgs(state.release));
    if (released.object == nullptr) {
      Py_XDECREF(outputs);
      Py_XDECREF(type);
      Py_XDECREF(value);
      Py_XDECREF(trace);
      return nullptr;
    }
    PyErr_Restore(type, value, trace);
    if (outputs != nullptr || type != nullptr) return outputs;
  }
  return PyObject_CallOneArg(state.otherwise, inputs);
  END_HANDLE_TH_ERRORS
}

int entry_traverse(PyObject* self, visitproc visit, void* arg) {
  if (const EntryState* state = reinterpret_cast<Entry*>(self)->state) {
    for (PyObject* one : state->held) Py_VISIT(one);
  }
  return 0;
}

int entry_clear(PyObject* self) {
  if (EntryState* state = reinterpret_cast<Entry*>(self)->state) {
    std::vector<PyObject*> gone;
    gone.swap(state->held);
    for (PyObject* one : gone) Py_DECREF(one);
  }
  return 0;
}

void entry_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  entry_clear(self);
  delete reinterpret_cast<Entry*>(self)->state;
  Py_TYPE(self)->tp_free(self);
}

// piece, tree, turns: whose attributes are read; path: the tree's list; marks: what counts steps; capturing, stream: of
// the device; lock: the tree's; any_thread: whether calls of all threads are alike; otherwise: the piece as Python calls it
PyObject* entry_new(PyTypeObject* type, PyObject* args, PyObject* names) {
  static const char* words[] = {"piece", "tree", "turns", "path", "marks", "capturing", "stream", "lock", "any_thread",
                                "otherwise", nullptr};
  PyObject *piece, *tree, *turns, *path, *marks, *capturing, *stream, *lock, *otherwise;
  int any_thread;
  if (!PyArg_ParseTupleAndKeywords(args, names, "OOOO!OOOOpO", const_cast<char**>(words), &piece, &tree, &turns,
                                   &PyList_Type, &path, &marks, &capturing, &stream, &lock, &any_thread, &otherwise)) {
    return nullptr;
  }
  if (places.node == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "`measure` comes first");
    return nullptr;
  }
  if (!named()) return nullptr;
  auto* self = reinterpret_cast<Entry*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->call = entry_call;
  auto* state = self->state = new EntryState;
  const auto keep = [state](PyObject* object) {  // a reference that is given
    if (object != nullptr) state->held.push_back(object);
    return object;
  };
  state->acquire = keep(PyObject_GetAttrString(lock, "acquire"));
  state->release = keep(PyObject_GetAttrString(lock, "release"));
  state->piece = keep(Py_NewRef(piece));
  state->tree = keep(Py_NewRef(tree));
  state->turns = keep(Py_NewRef(turns));
  state->path = keep(Py_NewRef(path));
  state->marks = keep(Py_NewRef(marks));
  state->capturing = keep(Py_NewRef(capturing));
  state->stream = keep(Py_NewRef(stream));
  state->otherwise = keep(Py_NewRef(otherwise));
  state->any_thread = any_thread != 0;
  if (state->acquire == nullptr || state->release == nullptr) {
    Py_DECREF(self);
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(self);
}

PyTypeObject EntryType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// ---------------------------------------------------------------- the module

// drive(library, exchange): looks up what launches, in a library that the process has or can load; `exchange`: torch's
// capsule of DLPack's functions
PyObject* drive(PyObject*, PyObject* args) {
  const char* library;
  PyObject* capsule;
  if (!PyArg_ParseTuple(args, "sO", &library, &capsule)) return nullptr;
  const auto* table = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (table == nullptr) return nullptr;
  if (table->header.version.major != DLPACK_MAJOR_VERSION || table->current_work_stream == nullptr) {
    PyErr_SetString(PyExc_OSError, "torch's DLPack functions are of another version");
    return nullptr;
  }
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    PyErr_SetString(PyExc_OSError, dlerror());
    return nullptr;
  }
  auto graph = reinterpret_cast<GraphLaunch>(dlsym(opened, "cuGraphLaunch"));
  auto kernel = reinterpret_cast<KernelLaunch>(dlsym(opened, "cuLaunchKernel"));
  if (graph == nullptr || kernel == nullptr) {
    PyErr_Format(PyExc_OSError, "%s does not launch graphs and kernels", library);
    return nullptr;
  }
  driver = {graph, kernel,
            reinterpret_cast<SetParameters>(dlsym(opened, "cuGraphExecKernelNodeSetParams_v2")),
            reinterpret_cast<CaptureInfo>(dlsym(opened, "cuStreamGetCaptureInfo_v3")),
            reinterpret_cast<RetainContext>(dlsym(opened, "cuDevicePrimaryCtxRetain")),
            reinterpret_cast<SetContext>(dlsym(opened, "cuCtxSetCurrent")),
            reinterpret_cast<GraphNodes>(dlsym(opened, "cuGraphGetNodes")),
            reinterpret_cast<KindOfNode>(dlsym(opened, "cuGraphNodeGetType")),
            reinterpret_cast<KernelOfNode>(dlsym(opened, "cuGraphKernelNodeGetParams_v2")),
            reinterpret_cast<CopyOfNode>(dlsym(opened, "cuGraphMemcpyNodeGetParams")),
            reinterpret_cast<FillOfNode>(dlsym(opened, "cuGraphMemsetNodeGetParams")),
            reinterpret_cast<ParameterInfo>(dlsym(opened, "cuFuncGetParamInfo")),
            reinterpret_cast<ParameterInfo>(dlsym(opened, "cuKernelGetParamInfo"))};
  exchange = table;
  Py_RETURN_NONE;
}

// sets_parameters(): whether the driver tells which node a kernel becomes, and sets its parameters later.
PyObject* sets_parameters(PyObject*, PyObject*) {
  return PyBool_FromLong(driver.set != nullptr && driver.info != nullptr);
}

// last_node(device): the one node that what is captured next on the current stream comes after; 0 where there is none, or
// the driver cannot tell, or could not change it later
PyObject* last_node(PyObject*, PyObject* args) {
  int device;
  if (!PyArg_ParseTuple(args, "i", &device)) return nullptr;
  void *stream = nullptr, *graph = nullptr, **nodes = nullptr;
  const void* edges = nullptr;
  int status = 0;
  uint64_t id = 0;
  size_t count = 0;
  const bool told = driver.set != nullptr && driver.info != nullptr &&
      exchange->current_work_stream(device < 0 ? kDLCPU : kDLCUDA, device, &stream) == 0 &&
      driver.info(stream, &status, &id, &graph, &nodes, &edges, &count) == 0;
  if (!told) PyErr_Clear();
  return PyLong_FromVoidPtr(told && status == 1 && count == 1 ? nodes[0] : nullptr);
}

// reads_nodes(): whether the driver tells all of a captured graph's nodes, and sets parameters of its kernels later
PyObject* reads_nodes(PyObject*, PyObject*) {
  return PyBool_FromLong(driver.set != nullptr && driver.nodes != nullptr && driver.kind != nullptr &&
                         driver.kernel_of != nullptr && driver.copy_of != nullptr && driver.fill_of != nullptr &&
                         driver.of_function != nullptr && driver.of_kernel != nullptr);
}

PyObject* unreadable(const char* what, int status) {
  PyErr_Format(PyExc_ValueError, "the driver answers %d to what is asked of %s", status, what);
  return nullptr;
}

constexpr size_t MOST_PARAMETERS = 4096, MOST_BYTES = 1 << 16;  // CUDA's own limits are far below

PyObject* bytes_of(const void* from, size_t size) {
  return PyBytes_FromStringAndSize(static_cast<const char*>(from), static_cast<Py_ssize_t>(size));
}

// A new reference to the parameters of a kernel, as bytes each.
PyObject* parameters_of(const NodeParameters& how) {
  const ParameterInfo info = how.function != nullptr ? driver.of_function : driver.of_kernel;
  void* function = how.function != nullptr ? how.function : how.kernel;
  if (function == nullptr || how.extra != nullptr) {
    PyErr_SetString(PyExc_ValueError, "a kernel was launched in a way in which its parameters are not known");
    return nullptr;
  }
  PyObject* found = PyList_New(0);
  if (found == nullptr) return nullptr;
  for (size_t index = 0;; index++) {
    size_t at = 0, size = 0;
    const int status = info(function, index, &at, &size);
    if (status == INVALID_VALUE) break;  // there are no more
    if (status != 0 || size > MOST_BYTES || index >= MOST_PARAMETERS || how.parameters == nullptr ||
        how.parameters[index] == nullptr) {
      Py_DECREF(found);
      return unreadable("a kernel's parameters", status);
    }
    PyObject* bytes = bytes_of(how.parameters[index], size);
    const bool right = bytes != nullptr && PyList_Append(found, bytes) == 0;
    Py_XDECREF(bytes);
    if (!right) {
      Py_DECREF(found);
      return nullptr;
    }
  }
  PyObject* made = PyList_AsTuple(found);
  Py_DECREF(found);
  return made;
}

unsigned long long as_number(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

PyObject* described(void* node) {
  int kind = -1;
  if (const int status = driver.kind(node, &kind); status != 0) return unreadable("a node's kind", status);
  const unsigned long long handle = as_number(node);
  if (kind == KERNEL_NODE) {
    NodeParameters how = {};
    if (const int status = driver.kernel_of(node, &how); status != 0) return unreadable("a kernel", status);
    PyObject* parameters = parameters_of(how);
    if (parameters == nullptr) return nullptr;
    return Py_BuildValue("Ki(KKKIIIIIII)N", handle, kind, as_number(how.function), as_number(how.kernel),
                         as_number(how.context), how.x, how.y, how.z, how.threads_x, how.threads_y, how.threads_z,
                         how.shared, parameters);
  }
  if (kind == COPY_NODE) {
    CopyParameters how = {};
    if (const int status = driver.copy_of(node, &how); status != 0) return unreadable("a copy", status);
    const auto n = [](auto value) { return static_cast<unsigned long long>(value); };
    return Py_BuildValue(
        "Ki(iiKKKKKKKKKKKKKKKKKKKKK)(NN)", handle, kind, how.source_kind, how.target_kind, n(how.source_x),
        n(how.source_y), n(how.source_z), n(how.source_level), as_number(how.source_host), as_number(how.source_array),
        n(how.source_pitch), n(how.source_height), n(how.target_x), n(how.target_y), n(how.target_z),
        n(how.target_level), as_number(how.target_host), as_number(how.target_array), n(how.target_pitch),
        n(how.target_height), n(how.width), n(how.height), n(how.depth), as_number(how.reserved),
        as_number(how.reserved_too), bytes_of(&how.source, sizeof(how.source)), bytes_of(&how.target, sizeof(how.target)));
  }
  if (kind == FILL_NODE) {
    FillParameters how = {};
    if (const int status = driver.fill_of(node, &how); status != 0) return unreadable("a fill", status);
    return Py_BuildValue("Ki(KIIKK)(N)", handle, kind, static_cast<unsigned long long>(how.pitch), how.value, how.bytes,
                         static_cast<unsigned long long>(how.width), static_cast<unsigned long long>(how.height),
                         bytes_of(&how.target, sizeof(how.target)));
  }
  return Py_BuildValue("Ki()()", handle, kind);
}

// nodes(graph): all of a captured graph's, as (handle, kind, numbers, values), see `devices/patches.py`. ValueError where
// the driver does not tell.
PyObject* nodes_of(PyObject*, PyObject* value) {
  HANDLE_TH_ERRORS
  uint64_t graph = 0;
  if (!whole(value, &graph)) return nullptr;
  if (driver.nodes == nullptr || driver.kind == nullptr || driver.kernel_of == nullptr || driver.copy_of == nullptr ||
      driver.fill_of == nullptr || driver.of_function == nullptr || driver.of_kernel == nullptr) {
    PyErr_SetString(PyExc_ValueError, "the driver does not tell of a graph's nodes");
    return nullptr;
  }
  size_t count = 0;
  if (const int status = driver.nodes(reinterpret_cast<void*>(graph), nullptr, &count); status != 0) {
    return unreadable("a graph", status);
  }
  std::vector<void*> nodes(count + 1, nullptr);
  size_t there = count;
  if (count > 0) {
    if (const int status = driver.nodes(reinterpret_cast<void*>(graph), nodes.data(), &there); status != 0) {
      return unreadable("a graph", status);
    }
  }
  if (there != count) return unreadable("a graph, whose nodes change", 0);
  PyObject* found = PyList_New(0);
  for (size_t at = 0; found != nullptr && at < count; at++) {
    PyObject* one = described(nodes[at]);
    const bool right = one != nullptr && PyList_Append(found, one) == 0;
    Py_XDECREF(one);
    if (!right) Py_CLEAR(found);
  }
  return found;
  END_HANDLE_TH_ERRORS
}

Py_ssize_t offset_of(PyObject* type, const char* name) {
  PyObject* found = PyObject_GetAttrString(type, name);
  if (found == nullptr) return -1;
  Py_ssize_t at = -1;
  if (Py_IS_TYPE(found, &PyMemberDescr_Type) &&
      reinterpret_cast<PyMemberDescrObject*>(found)->d_member->type == T_OBJECT_EX) {
    at = reinterpret_cast<PyMemberDescrObject*>(found)->d_member->offset;
  } else {
    PyErr_Format(PyExc_TypeError, "%s is no slot of an object", name);
  }
  Py_DECREF(found);
  return at;
}

// measure(Slot, Node, uses, references): where these classes keep what is read here, and by how much the counts of
// Python and torch are above those that are read here
PyObject* measure(PyObject*, PyObject* args) {
  PyObject *slot, *node;
  long long more_uses, more_references;
  if (!PyArg_ParseTuple(args, "O!O!LL", &PyType_Type, &slot, &PyType_Type, &node, &more_uses, &more_references)) {
    return nullptr;
  }
  Places found;
  found.uses = more_uses;
  found.references = more_references;
  const std::pair<const char*, Py_ssize_t*> wanted[] = {
      {"handle", &found.handle}, {"storage", &found.storage}, {"base", &found.base},       {"refs", &found.refs},
      {"kept", &found.kept},     {"kept_refs", &found.kept_refs}, {"address", &found.address}};
  for (const auto& [name, at] : wanted) {
    if ((*at = offset_of(slot, name)) < 0) return nullptr;
  }
  const std::pair<const char*, Py_ssize_t*> of_node[] = {{"watched", &found.watched}, {"children", &found.children},
                                                         {"ready", &found.ready},     {"holds", &found.holds},
                                                         {"run", &found.run}};
  for (const auto& [name, at] : of_node) {
    if ((*at = offset_of(node, name)) < 0) return nullptr;
  }
  found.slot = reinterpret_cast<PyTypeObject*>(Py_NewRef(slot));
  found.node = reinterpret_cast<PyTypeObject*>(Py_NewRef(node));
  Py_XDECREF(places.slot);
  Py_XDECREF(places.node);
  places = found;
  Py_RETURN_NONE;
}

// Uses of a slot's storage, references to its object and to the tensor that is kept, as they are read here.
PyObject* counts(PyObject*, PyObject* slot) {
  if (places.slot == nullptr || !PyObject_TypeCheck(slot, places.slot)) {
    PyErr_SetString(PyExc_TypeError, "what is counted is a slot, once it was measured");
    return nullptr;
  }
  bool error = false;
  const int64_t handle = number(slot, places.handle, &error);
  if (error) return nullptr;
  return Py_BuildValue("LLL", static_cast<long long>(uses(handle)),
                       static_cast<long long>(references(held(slot, places.storage))),
                       static_cast<long long>(references(held(slot, places.kept))));
}

PyObject* is_alive(PyObject*, PyObject* slot) {
  const int lives = alive(slot);
  return lives < 0 ? nullptr : PyBool_FromLong(lives);
}

PyMethodDef functions[] = {
    {"shorten", shorten, METH_O, nullptr},   {"drive", drive, METH_VARARGS, nullptr},
    {"measure", measure, METH_VARARGS, nullptr}, {"counts", counts, METH_O, nullptr},
    {"alive", is_alive, METH_O, nullptr},    {"last_node", last_node, METH_VARARGS, nullptr},
    {"sets_parameters", sets_parameters, METH_NOARGS, nullptr}, {"reads_nodes", reads_nodes, METH_NOARGS, nullptr},
    {"nodes", nodes_of, METH_O, nullptr},    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_calls", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

bool add(PyObject* to, PyTypeObject* type, const char* name, const char* full, Py_ssize_t size, newfunc make,
         destructor end) {
  type->tp_name = full;
  type->tp_basicsize = size;
  type->tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  if (type->tp_traverse != nullptr) type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_vectorcall_offset = static_cast<Py_ssize_t>(sizeof(PyObject));
  type->tp_call = PyVectorcall_Call;
  type->tp_new = make;
  type->tp_dealloc = end;
  return PyType_Ready(type) == 0 && PyModule_AddObjectRef(to, name, reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace

PyMODINIT_FUNC PyInit__calls() {
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) return nullptr;
  AloneType.tp_traverse = alone_traverse;
  AloneType.tp_clear = alone_clear;
  EntryType.tp_traverse = entry_traverse;
  EntryType.tp_clear = entry_clear;
  if (!add(made, &HoldsType, "Holds", "calls.Holds", sizeof(Holds), holds_new, holds_dealloc) ||
      !add(made, &AloneType, "Alone", "calls.Alone", sizeof(Alone), alone_new, alone_dealloc) ||
      !add(made, &MakerType, "Maker", "calls.Maker", sizeof(Maker), maker_new, maker_dealloc) ||
      !add(made, &LaunchType, "Launch", "calls.Launch", sizeof(Launch), launch_new, launch_dealloc) ||
      !add(made, &EntryType, "Entry", "calls.Entry", sizeof(Entry), entry_new, entry_dealloc)) {
    Py_DECREF(made);
    return nullptr;
  }
  return made;
}
