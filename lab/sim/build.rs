//! Embeds every file of `lab/scenarios/` into the binary, so that a new experiment needs only a new file.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

fn main() -> std::io::Result<()> {
    let manifest_directory = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let scenario_directory = manifest_directory.join("../scenarios").canonicalize()?;
    println!("cargo::rerun-if-changed={}", scenario_directory.display());
    let mut scenario_files: Vec<PathBuf> =
        std::fs::read_dir(&scenario_directory)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
    scenario_files.retain(|file| file.extension().is_some_and(|extension| extension == "toml"));
    scenario_files.sort();
    let mut generated_code =
        String::from("/// Name and text of every file of `lab/scenarios/`.\nconst SCENARIOS: &[(&str, &str)] = &[\n");
    for file in &scenario_files {
        let scenario_name = file.file_stem().and_then(|stem| stem.to_str()).expect("scenarios have plain names");
        writeln!(generated_code, "    ({scenario_name:?}, include_str!({:?})),", file).expect("into a string");
    }
    generated_code.push_str("];\n");
    let out_directory = std::env::var_os("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out_directory).join("scenarios.rs"), generated_code)
}
