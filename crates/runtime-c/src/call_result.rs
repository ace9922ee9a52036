//! Results and errors of the C functions.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::fmt::Display;

thread_local! {
    static LAST_CALL_ERROR: RefCell<CString> = RefCell::default();
}

/// Returns the text of this thread's last error, valid until its next error, or an empty text if there was none.
#[unsafe(no_mangle)]
pub extern "C" fn coreward_last_error() -> *const c_char {
    LAST_CALL_ERROR.with_borrow(|text| text.as_ptr())
}

/// Stores the error's text, which [`coreward_last_error`] returns.
pub(crate) fn set_last_error(error: impl Display) {
    let text = error.to_string().replace('\0', " ");
    LAST_CALL_ERROR.set(CString::new(text).unwrap_or_default());
}

/// Returns the status code of a C function: 0 for success, and -1 for an error, whose text is stored.
pub(crate) fn to_status_code(result: Result<(), impl Display>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => {
            set_last_error(error);
            -1
        }
    }
}

/// Returns the object to which a caller's pointer points. If it is null, stores an error and returns `None`.
///
/// # Safety
///
/// `pointer` is null, or points to an object that is not used otherwise during `'a`.
pub(crate) unsafe fn exclusive_ref<'a, T>(pointer: *mut T) -> Option<&'a mut T> {
    // SAFETY: by this function's contract.
    let object = unsafe { pointer.as_mut() };
    if object.is_none() {
        set_last_error("a null pointer: expected an object of this library");
    }
    object
}

/// Returns the object to which a caller's pointer points, and which threads may share. If the pointer is null, stores
/// an error and returns `None`.
///
/// # Safety
///
/// `pointer` is null, or points to an object that does not change during `'a`.
pub(crate) unsafe fn shared_ref<'a, T>(pointer: *const T) -> Option<&'a T> {
    // SAFETY: by this function's contract.
    let object = unsafe { pointer.as_ref() };
    if object.is_none() {
        set_last_error("a null pointer: expected an object of this library");
    }
    object
}

/// Drops the object to which a caller's pointer points, unless the pointer is null.
///
/// # Safety
///
/// `pointer` is null or from [`Box::into_raw`], and is not used again.
pub(crate) unsafe fn free_box<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: by this function's contract.
        drop(unsafe { Box::from_raw(pointer) });
    }
}
