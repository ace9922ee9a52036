//! Embeds every file of `lab/scenarios/` into the binary, so that a new experiment needs only a new file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() -> std::io::Result<()> {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let directory = root.join("../scenarios").canonicalize()?;
    println!("cargo::rerun-if-changed={}", directory.display());
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(&directory)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "toml"));
    files.sort();
    let mut code =
        String::from("/// Name and text of every file of `lab/scenarios/`.\nconst SCENARIOS: &[(&str, &str)] = &[\n");
    for file in &files {
        let name = file.file_stem().and_then(|stem| stem.to_str()).expect("scenarios have plain names");
        writeln!(code, "    ({name:?}, include_str!({:?})),", file).expect("into a string");
    }
    code.push_str("];\n");
    let out = std::env::var_os("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("scenarios.rs"), code)
}
