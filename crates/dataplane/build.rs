//! Compiles every `bpf/*/*.bpf.c` and generates its skeleton as the module `skeleton::<file name>` of the crate. New
//! files there need no change here.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use libbpf_cargo::SkeletonBuilder;

fn main() {
    let source_directory = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../bpf");
    let output_directory = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    println!("cargo::rerun-if-changed={}", source_directory.display());
    let program_sources = find_program_sources(&source_directory);
    let mut skeleton_modules = String::new();
    for (name, source) in &program_sources {
        let skeleton_path = output_directory.join(format!("{name}.skel.rs"));
        SkeletonBuilder::new()
            .source(source)
            .obj(output_directory.join(format!("{name}.bpf.o")))
            .clang("clang-19")
            .clang_args(clang_arguments(&source_directory))
            .build_and_generate(&skeleton_path)
            .unwrap_or_else(|error| panic!("{} (needs Debian package clang-19): {error:#}", source.display()));
        writeln!(skeleton_modules, "pub mod {name} {{ include!({:?}); }}", skeleton_path.display().to_string())
            .unwrap();
    }
    let object_entry = |name: &String| {
        format!("({name:?}, include_bytes!({:?}) as &[u8])", output_directory.join(format!("{name}.bpf.o")))
    };
    let object_entries: Vec<String> = program_sources.keys().map(object_entry).collect();
    writeln!(
        skeleton_modules,
        "pub const OBJECTS: [(&str, &[u8]); {}] = [{}];",
        program_sources.len(),
        object_entries.join(", ")
    )
    .unwrap();
    std::fs::write(output_directory.join("skeletons.rs"), skeleton_modules).unwrap();
}

fn find_program_sources(sources: &Path) -> BTreeMap<String, PathBuf> {
    let list_directory = |folder: &Path| {
        let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let subdirectories = list_directory(sources).into_iter().filter(|path| path.is_dir());
    let source_files = subdirectories.flat_map(|folder| list_directory(&folder));
    let program_name = |path: &PathBuf| path.file_name()?.to_str()?.strip_suffix(".bpf.c").map(String::from);
    source_files.filter_map(|path| Some((program_name(&path)?, path))).collect()
}

/// Returns clang's arguments, of which `-mcpu=v3` (32-bit operations) is the newest instruction set that kernel 6.1
/// knows.
fn clang_arguments(sources: &Path) -> Vec<String> {
    let target_architecture = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let mut arguments: Vec<String> = ["-mcpu=v3", "-Wall", "-Wextra", "-Werror"].map(String::from).to_vec();
    arguments.push(format!("-I{}", sources.join("include").display()));
    // clang for the target bpf does not search Debian's directory for one architecture, which contains asm/types.h.
    arguments.push(format!("-idirafter/usr/include/{target_architecture}-linux-gnu"));
    arguments
}
