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
    for (program_name, source_path) in &program_sources {
        let skeleton_path = output_directory.join(format!("{program_name}.skel.rs"));
        SkeletonBuilder::new()
            .source(source_path)
            .obj(output_directory.join(format!("{program_name}.bpf.o")))
            .clang("clang-19")
            .clang_args(clang_arguments(&source_directory))
            .build_and_generate(&skeleton_path)
            .unwrap_or_else(|error| panic!("{} (needs Debian package clang-19): {error:#}", source_path.display()));
        writeln!(skeleton_modules, "pub mod {program_name} {{ include!({:?}); }}", skeleton_path.display().to_string())
            .unwrap();
    }
    let format_object_entry = |program_name: &String| {
        format!(
            "({program_name:?}, include_bytes!({:?}) as &[u8])",
            output_directory.join(format!("{program_name}.bpf.o"))
        )
    };
    let object_entries: Vec<String> = program_sources.keys().map(format_object_entry).collect();
    writeln!(
        skeleton_modules,
        "pub const OBJECTS: [(&str, &[u8]); {}] = [{}];",
        program_sources.len(),
        object_entries.join(", ")
    )
    .unwrap();
    std::fs::write(output_directory.join("skeletons.rs"), skeleton_modules).unwrap();
}

fn find_program_sources(source_directory: &Path) -> BTreeMap<String, PathBuf> {
    let list_directory = |directory: &Path| {
        let entries = std::fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let subdirectories = list_directory(source_directory).into_iter().filter(|path| path.is_dir());
    let source_files = subdirectories.flat_map(|directory| list_directory(&directory));
    let parse_program_name = |path: &PathBuf| path.file_name()?.to_str()?.strip_suffix(".bpf.c").map(String::from);
    source_files.filter_map(|path| Some((parse_program_name(&path)?, path))).collect()
}

/// Returns the arguments for clang. `-mcpu=v3`, with 32-bit operations, is the newest BPF instruction set that Linux
/// 6.1 supports.
fn clang_arguments(source_directory: &Path) -> Vec<String> {
    let target_architecture = std::env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    let mut arguments: Vec<String> = ["-mcpu=v3", "-Wall", "-Wextra", "-Werror"].map(String::from).to_vec();
    arguments.push(format!("-I{}", source_directory.join("include").display()));
    // clang for the target bpf does not search Debian's directory for one architecture, which contains asm/types.h.
    arguments.push(format!("-idirafter/usr/include/{target_architecture}-linux-gnu"));
    arguments
}
