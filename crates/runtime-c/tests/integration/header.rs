//! The committed header against the one that build.rs makes from the source.

/// Environment variable: if it is set, the test first writes the header.
const WRITE: &str = "COREWARD_WRITE_HEADER";

#[test]
fn header_declares_the_interface() {
    let made = include_str!(concat!(env!("OUT_DIR"), "/coreward_runtime.h"));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/include/coreward_runtime.h");
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(path, made).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    assert!(committed == made, "{path}: differs from the source; write it by {WRITE}=1");
}
