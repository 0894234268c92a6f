// Clang gives every function of an Objective-C++ file the GNU runtime's personality, which ends the
// process when a C++ exception comes by. This definition, hidden inside our library, replaces it for
// our own frames by C++'s personality. Objective-C's @catch is thereby out of use here.
#include <unwind.h>

extern "C" {

_Unwind_Reason_Code __gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class,
                                         _Unwind_Exception*, _Unwind_Context*);

__attribute__((visibility("hidden"))) _Unwind_Reason_Code
__gnu_objc_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class kind,
                          _Unwind_Exception* exception, _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, kind, exception, context);
}

}  // extern "C"
