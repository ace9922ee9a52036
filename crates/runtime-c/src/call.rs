//! Results and errors of calls.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::fmt::Display;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Returns the text of this thread's last error, valid until the next one; empty without any.
#[unsafe(no_mangle)]
pub extern "C" fn coreward_last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|text| text.as_ptr())
}

/// Stores the error's text for [`coreward_last_error`].
pub(crate) fn set_error(error: impl Display) {
    let text = error.to_string().replace('\0', " ");
    LAST_ERROR.set(CString::new(text).unwrap_or_default());
}

/// Returns 0, or -1 and stores the error.
pub(crate) fn to_status_code(result: Result<(), impl Display>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            set_error(error);
            -1
        }
    }
}

/// Returns the object of a caller's pointer; `None`, and an error, if it is null.
///
/// # Safety
///
/// `pointer` is null or of an object without other users during `'a`.
pub(crate) unsafe fn exclusive_ref<'a, T>(pointer: *mut T) -> Option<&'a mut T> {
    // SAFETY: by this function's contract.
    let object = unsafe { pointer.as_mut() };
    if object.is_none() {
        set_error("a null pointer: expected an object of this library");
    }
    object
}

/// Returns a reference to an object that threads share; `None` for null.
///
/// # Safety
///
/// `pointer` is null or of an object that does not change during `'a`.
pub(crate) unsafe fn shared_ref<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: by this function's contract.
    let object = unsafe { pointer.as_ref() };
    if object.is_none() {
        set_error("a null pointer: expected an object of this library");
    }
    object
}

/// Drops the object of a caller's pointer, which may be null.
///
/// # Safety
///
/// `pointer` is null or from [`Box::into_raw`], and is not used again.
pub(crate) unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: by this function's contract.
        drop(unsafe { Box::from_raw(pointer) });
    }
}
