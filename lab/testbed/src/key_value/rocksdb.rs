//! Key-value store over RocksDB, whose library is loaded at run time, so that the laboratory runs without it.

use std::ffi::{CStr, CString, c_char, c_uchar, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

use anyhow::{Context as _, bail};
use coreward_load::key_value::{self, KeyValueRequest, KeyValueResponseStatus, KeyValueResponseWriter};
use coreward_load::request_type::RequestType;

use super::store::{KeyValueDatabase, initial_value_bytes};

const ROCKSDB_LIBRARY_NAME: &CStr = c"librocksdb.so.7.8";
const ROCKSDB_PACKAGE_NAME: &str = "librocksdb7.8";

type RocksDbHandle = *mut c_void;
type RocksDbErrorPointer = *mut *mut c_char;

/// Declares a struct of pointers to the listed functions of rocksdb/c.h, and loads them from the shared library.
macro_rules! functions {
    ($(fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn load() -> anyhow::Result<Self> {
                // SAFETY: a C string; the library has no initialization that depends on this program.
                let library = NonNull::new(unsafe { libc::dlopen(ROCKSDB_LIBRARY_NAME.as_ptr(), libc::RTLD_NOW) });
                let library =
                    library.with_context(|| {
                        format!("no {ROCKSDB_LIBRARY_NAME:?}: expected Debian package {ROCKSDB_PACKAGE_NAME}")
                    })?;
                Ok(Self {
                    $($name: {
                        let name = CString::new(concat!("rocksdb_", stringify!($name)))?;
                        // SAFETY: an open library and a C string.
                        let symbol = NonNull::new(unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) });
                        let symbol =
                            symbol.with_context(|| format!("{ROCKSDB_LIBRARY_NAME:?} has no function {name:?}"))?;
                        // SAFETY: the type is that of rocksdb/c.h.
                        unsafe {
                            std::mem::transmute::<RocksDbHandle, unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                                symbol.as_ptr(),
                            )
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    fn options_create() -> RocksDbHandle;
    fn options_set_create_if_missing(RocksDbHandle, c_uchar);
    fn options_destroy(RocksDbHandle);
    fn open(RocksDbHandle, *const c_char, RocksDbErrorPointer) -> RocksDbHandle;
    fn close(RocksDbHandle);
    fn readoptions_create() -> RocksDbHandle;
    fn readoptions_destroy(RocksDbHandle);
    fn writeoptions_create() -> RocksDbHandle;
    fn writeoptions_destroy(RocksDbHandle);
    fn put(RocksDbHandle, RocksDbHandle, *const c_char, usize, *const c_char, usize, RocksDbErrorPointer);
    fn get(RocksDbHandle, RocksDbHandle, *const c_char, usize, *mut usize, RocksDbErrorPointer) -> *mut c_char;
    fn create_iterator(RocksDbHandle, RocksDbHandle) -> RocksDbHandle;
    fn iter_seek(RocksDbHandle, *const c_char, usize);
    fn iter_valid(RocksDbHandle) -> c_uchar;
    fn iter_next(RocksDbHandle);
    fn iter_key(RocksDbHandle, *mut usize) -> *const c_char;
    fn iter_value(RocksDbHandle, *mut usize) -> *const c_char;
    fn iter_destroy(RocksDbHandle);
    fn free(RocksDbHandle);
}

/// Open RocksDB database. Dropping this value closes the database.
pub(crate) struct RocksDb {
    functions: Functions,
    database: RocksDbHandle,
    read_options: RocksDbHandle,
    write_options: RocksDbHandle,
}

// SAFETY: RocksDB locks internally, and the options are only read.
unsafe impl Send for RocksDb {}
// SAFETY: as above.
unsafe impl Sync for RocksDb {}

impl RocksDb {
    /// Opens the database in `directory`, or creates it if it does not exist. Writes the initial keys (see
    /// [`super::store::InMemoryStore::with_keys`]). Fails without the library, or with RocksDB's error.
    pub(crate) fn open(directory: &Path, key_count: u32, value_length: usize) -> anyhow::Result<Self> {
        let functions = Functions::load()?;
        let path = CString::new(directory.as_os_str().as_bytes())?;
        let mut error = null_mut();
        // SAFETY: the functions get handles of their own kinds, a C string, and a place for the error.
        let rocksdb = unsafe {
            let options = (functions.options_create)();
            (functions.options_set_create_if_missing)(options, 1);
            let database = (functions.open)(options, path.as_ptr(), &raw mut error);
            (functions.options_destroy)(options);
            let [read_options, write_options] = [(functions.readoptions_create)(), (functions.writeoptions_create)()];
            Self { functions, database, read_options, write_options }
        };
        rocksdb.check_error(error).with_context(|| directory.display().to_string())?;
        for number in 0..key_count {
            rocksdb.put(key_value::key_name(number).as_bytes(), &initial_value_bytes(number, value_length))?;
        }
        Ok(rocksdb)
    }

    /// Converts RocksDB's error text, if any, to an error and frees the text.
    fn check_error(&self, error: *mut c_char) -> anyhow::Result<()> {
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: RocksDB's errors are C strings, which the caller frees.
        let text = unsafe {
            let text = CStr::from_ptr(error).to_string_lossy().into_owned();
            (self.functions.free)(error.cast());
            text
        };
        bail!("RocksDB: {text}")
    }

    fn put(&self, key: &[u8], value: &[u8]) -> anyhow::Result<()> {
        let mut error = null_mut();
        // SAFETY: the database is open; pointers and lengths are those of slices.
        unsafe {
            let (key, key_length) = (key.as_ptr().cast(), key.len());
            let (value, value_length) = (value.as_ptr().cast(), value.len());
            (self.functions.put)(
                self.database,
                self.write_options,
                key,
                key_length,
                value,
                value_length,
                &raw mut error,
            );
        }
        self.check_error(error)
    }

    /// Calls `use_value` with the value of `key`, if the key exists. Returns whether it exists.
    fn get(&self, key: &[u8], use_value: impl FnOnce(&[u8])) -> anyhow::Result<bool> {
        let (mut length, mut error) = (0, null_mut());
        // SAFETY: the database is open; pointer and length are those of a slice.
        let value = unsafe {
            let (key, key_length) = (key.as_ptr().cast(), key.len());
            (self.functions.get)(self.database, self.read_options, key, key_length, &raw mut length, &raw mut error)
        };
        self.check_error(error)?;
        if value.is_null() {
            return Ok(false);
        }
        // SAFETY: RocksDB returned so many bytes, which the caller frees.
        unsafe {
            use_value(std::slice::from_raw_parts(value.cast(), length));
            (self.functions.free)(value.cast());
        }
        Ok(true)
    }

    /// Calls `use_pair` with up to `pair_count` pairs of key and value. They begin at `key` and are in the order of
    /// their keys.
    fn scan(&self, key: &[u8], pair_count: usize, mut use_pair: impl FnMut(&[u8], &[u8])) {
        let Functions { create_iterator, iter_seek, iter_valid, iter_next, iter_key, iter_value, iter_destroy, .. } =
            self.functions;
        // SAFETY: the database is open. A valid iterator's key and value live until it moves.
        unsafe {
            let iterator = create_iterator(self.database, self.read_options);
            iter_seek(iterator, key.as_ptr().cast(), key.len());
            let read_slice = |iterator_getter: unsafe extern "C" fn(RocksDbHandle, *mut usize) -> *const c_char| {
                let mut length = 0;
                let bytes = iterator_getter(iterator, &raw mut length);
                std::slice::from_raw_parts(bytes.cast::<u8>(), length)
            };
            for _ in 0..pair_count {
                if iter_valid(iterator) == 0 {
                    break;
                }
                use_pair(read_slice(iter_key), read_slice(iter_value));
                iter_next(iterator);
            }
            iter_destroy(iterator);
        }
    }
}

impl Drop for RocksDb {
    fn drop(&mut self) {
        // SAFETY: no handle is used again; a database that did not open is null.
        unsafe {
            (self.functions.readoptions_destroy)(self.read_options);
            (self.functions.writeoptions_destroy)(self.write_options);
            if !self.database.is_null() {
                (self.functions.close)(self.database);
            }
        }
    }
}

impl KeyValueDatabase for RocksDb {
    fn answer_request(&self, request: &KeyValueRequest<'_>, worker: u16, response: &mut KeyValueResponseWriter) {
        let log_error = |error: anyhow::Error| {
            tracing::warn!(
                event = "request-failed",
                error = format!("{error:#}"),
                "RocksDB failed: the server answers as if the key were missing"
            );
        };
        match request.request_type {
            RequestType::GET => {
                let mut found_value = None;
                if let Err(error) = self.get(request.key, |value| found_value = Some(value.to_vec())) {
                    log_error(error);
                }
                response.begin_response(
                    request,
                    if found_value.is_some() { KeyValueResponseStatus::Done } else { KeyValueResponseStatus::NotFound },
                    worker,
                );
                if let Some(value) = found_value {
                    response.push_pair(request.key, &value);
                }
            }
            RequestType::PUT => {
                let put_result = self.put(request.key, request.value).map_err(log_error);
                response.begin_response(
                    request,
                    if put_result.is_ok() { KeyValueResponseStatus::Done } else { KeyValueResponseStatus::NotFound },
                    worker,
                );
            }
            scan_type => {
                response.begin_response(request, KeyValueResponseStatus::Done, worker);
                let pair_count = scan_type.scan_pair_count().unwrap_or(0).into();
                self.scan(request.key, pair_count, |key, value| _ = response.push_pair(key, value));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::store::InMemoryStore;
    use super::*;

    fn answer_test_request(
        database: &dyn KeyValueDatabase,
        request_type: &str,
        key: &str,
        value: &[u8],
    ) -> Vec<Vec<u8>> {
        let key = key.as_bytes();
        let request =
            KeyValueRequest { request_type: request_type.parse().unwrap(), request_id: 1, service_ns: 0, key, value };
        let mut response = KeyValueResponseWriter::default();
        database.answer_request(&request, 2, &mut response);
        response.finish_response().map(<[u8]>::to_vec).collect()
    }

    #[test]
    fn rocksdb_and_in_memory_store_give_same_answers() {
        let directory = tempfile::tempdir().unwrap();
        let rocksdb = match RocksDb::open(directory.path(), 1000, 10) {
            Err(error) if error.to_string().contains(ROCKSDB_PACKAGE_NAME) => {
                println!("SKIPPED rocksdb_answers_as_the_store_in_memory: {error}");
                return;
            }
            open_result => open_result.unwrap(),
        };
        let memory_store = InMemoryStore::with_keys(1000, 10, 2000);
        for (request_type, key, value) in [
            ("GET", "user0000000007", &b""[..]),
            ("GET", "absent", b""),
            ("PUT", "absent", b"now present"),
            ("GET", "absent", b""),
            ("SCAN46", "user0000000400", b""),
            ("SCAN127", "user0000000990", b""),
            ("WORK3", "", b""),
        ] {
            let answers = [&rocksdb as &dyn KeyValueDatabase, &memory_store]
                .map(|store| answer_test_request(store, request_type, key, value));
            assert_eq!(answers[0], answers[1], "{request_type} {key}");
        }
        drop(rocksdb);
        let reopened_database = RocksDb::open(directory.path(), 0, 0).unwrap();
        let mut stored_value: Vec<u8> = Vec::new();
        assert!(reopened_database.get(b"absent", |value| stored_value.extend(value)).unwrap());
        assert_eq!(stored_value, b"now present");
        let error = RocksDb::open(Path::new("/dev/null/database"), 0, 0).map(drop).unwrap_err();
        assert!(format!("{error:#}").starts_with("/dev/null/database: RocksDB: IO error"), "{error:#}");
    }
}
