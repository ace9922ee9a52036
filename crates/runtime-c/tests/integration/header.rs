//! Compares the committed header with the one that build.rs generates from the source.

/// Environment variable that makes the test write the C header before it checks the header.
const WRITE_HEADER_ENV_VARIABLE: &str = "COREWARD_WRITE_HEADER";

#[test]
fn committed_header_matches_the_source() {
    let generated_header = include_str!(concat!(env!("OUT_DIR"), "/coreward_runtime.h"));
    let header_path = concat!(env!("CARGO_MANIFEST_DIR"), "/include/coreward_runtime.h");
    if std::env::var_os(WRITE_HEADER_ENV_VARIABLE).is_some() {
        std::fs::write(header_path, generated_header).unwrap();
    }
    let committed_header = std::fs::read_to_string(header_path).unwrap_or_default();
    assert!(
        committed_header == generated_header,
        "{header_path}: differs from the source; write it by {WRITE_HEADER_ENV_VARIABLE}=1"
    );
}
