//! Generates the header from the source, for the test that compares it with the committed one. Paths are relative,
//! because cargo runs this program in the package's directory, wherever it was compiled.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for watched_path in ["src", "cbindgen.toml"] {
        println!("cargo::rerun-if-changed={watched_path}");
    }
    let config = cbindgen::Config::from_file("cbindgen.toml")?;
    let sources = ["call_result", "server", "worker"].map(|name| format!("src/{name}.rs"));
    let builder = cbindgen::Builder::new().with_config(config);
    let builder = sources.into_iter().fold(builder, |builder, source| builder.with_src(source));
    builder.generate()?.write_to_file(Path::new(&std::env::var("OUT_DIR")?).join("coreward_runtime.h"));
    Ok(())
}
