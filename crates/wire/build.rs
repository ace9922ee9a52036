//! Compiles `proto/coreward.proto` with protox, so that no protoc has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["proto/coreward.proto"], ["proto"])?;
    // Tables are shared, not copied, by all streams that send one; of what racks pass up the numbers are read where they came.
    let shared = [".coreward.v1.DataplaneUpdate", ".coreward.v1.LoadSpread", ".coreward.v1.CandidateList"];
    shared
        .into_iter()
        .fold(tonic_prost_build::configure(), |builder, path| builder.bytes(path))
        .compile_fds(descriptors)?;
    Ok(())
}
