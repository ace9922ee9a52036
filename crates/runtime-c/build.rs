//! Makes the header from the source, for the test that compares it with the committed one.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for changed in ["src", "cbindgen.toml"] {
        println!("cargo::rerun-if-changed={changed}");
    }
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml"))?;
    let sources = ["call", "server", "worker"].map(|name| root.join(format!("src/{name}.rs")));
    let builder = cbindgen::Builder::new().with_config(config);
    let builder = sources.into_iter().fold(builder, |builder, source| builder.with_src(source));
    builder.generate()?.write_to_file(Path::new(&std::env::var("OUT_DIR")?).join("coreward_runtime.h"));
    Ok(())
}
