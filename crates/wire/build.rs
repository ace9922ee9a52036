//! Compiles `proto/coreward.proto` with protox, so that no protoc has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["proto/coreward.proto"], ["proto"])?;
    // Shared, not copied, by all streams that send one table.
    tonic_prost_build::configure().bytes(".coreward.v1.DataplaneUpdate").compile_fds(descriptors)?;
    Ok(())
}
