//! Test of the packages that `scripts/deb` builds, with their contents and what systemd's tools report about the units.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use coreward_testbed::fleet::coreward_binary_path;
use coreward_testbed::{find_missing_testbed_rights, skip_if};

fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

fn run_program(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).current_dir(repository_root()).output();
    output.unwrap_or_else(|error| panic!("{program}: {error} (scripts/install run)"))
}

fn run_and_expect_success(program: &str, arguments: &[&str]) -> String {
    let output = run_program(program, arguments);
    let error_output = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {error_output}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

const UNITS_AND_MAX_EXPOSURES: [(&str, f64); 5] =
    [("controller", 2.0), ("lb", 4.0), ("agent", 4.0), ("rack", 2.0), ("orchestrate", 3.0)];

/// Builds the Debian packages, and returns the output, which has a line with the path of each package.
fn build_packages(packages_directory: &Path) -> String {
    let command = coreward_binary_path().unwrap();
    let environment_variables =
        [format!("OUT={}", packages_directory.display()), format!("COREWARD={}", command.display())];
    run_and_expect_success("env", &[&environment_variables[0], &environment_variables[1], "LEVEL=1", "scripts/deb"])
}

fn join_path_as_text(directory: &Path, path: &str) -> String {
    directory.join(path).to_str().unwrap().to_owned()
}

/// Asserts that systemd accepts an unpacked systemd unit, and that the unit's exposure level is at most `max_exposure`.
fn assert_unit_is_confined(directory: &Path, daemon: &str, max_exposure: f64) {
    let unit_path = join_path_as_text(directory, &format!("usr/lib/systemd/system/coreward-{daemon}.service"));
    // The unit must name the command at its unpacked path, so that `verify` finds it.
    let text = std::fs::read_to_string(&unit_path)
        .unwrap()
        .replace("/usr/bin/coreward", &join_path_as_text(directory, "usr/bin/coreward"));
    let text = text.lines().filter(|line| !line.starts_with("Documentation=")).collect::<Vec<_>>().join("\n");
    std::fs::write(&unit_path, text).unwrap();
    let verify_output = run_program("systemd-analyze", &["verify", &unit_path]);
    assert!(
        verify_output.status.success() && verify_output.stderr.is_empty(),
        "{daemon}: {}",
        String::from_utf8_lossy(&verify_output.stderr)
    );
    let security_output = run_and_expect_success("systemd-analyze", &["security", "--offline=true", &unit_path]);
    let exposure_level =
        security_output.lines().find_map(|line| line.split_once("exposure level for ")?.1.split_once(": "));
    let exposure_level: f64 =
        exposure_level.and_then(|(_, level)| level.split(' ').next()?.parse().ok()).expect("a level");
    assert!(exposure_level <= max_exposure, "{daemon}: {exposure_level}");
}

/// Builds and unpacks the packages. Checks the command with the packaged libraries, the manual pages with man, and the
/// units with systemd-analyze.
#[test]
fn packages_contain_all_needed_files() {
    // The tools are installed only for root.
    skip_if!(find_missing_testbed_rights());
    let directory = tempfile::tempdir().unwrap();
    // out/deb is not used, because `make deb` may be writing there.
    let build_output = build_packages(&directory.path().join("packages"));
    let package_paths: Vec<&str> = build_output.lines().collect();
    assert_eq!(package_paths.len(), UNITS_AND_MAX_EXPOSURES.len() + 2, "{build_output}");
    let unpack_directory = directory.path().to_str().unwrap();
    for package in &package_paths {
        run_and_expect_success("dpkg-deb", &["--extract", package, unpack_directory]);
        assert_eq!(
            run_and_expect_success("dpkg-deb", &["--field", package, "Version"]).trim(),
            env!("CARGO_PKG_VERSION")
        );
    }
    let dependencies = run_and_expect_success("dpkg-deb", &["--field", package_paths[0], "Depends"]);
    assert!(dependencies.contains("libelf1") && dependencies.contains("libc6 (>="), "{dependencies}");
    let unpacked_path_text = |path: &str| join_path_as_text(directory.path(), path);
    for (command, manual_page, expected_word) in
        [("coreward", "coreward-lb", "--detach"), ("coreward-lab", "coreward-lab-sim", "trace")]
    {
        let version = run_and_expect_success(&unpacked_path_text(&format!("usr/bin/{command}")), &["--version"]);
        assert!(version.starts_with(&format!("{command} ")), "{version}");
        let manual_path = unpacked_path_text(&format!("usr/share/man/man1/{manual_page}.1.gz"));
        let manual_text = run_and_expect_success("man", &["--local-file", &manual_path]);
        assert!(manual_text.contains(expected_word), "{manual_page}");
        let completions_path = unpacked_path_text(&format!("usr/share/bash-completion/completions/{command}"));
        run_and_expect_success("bash", &["-n", &completions_path]);
    }

    for (daemon, max_exposure) in UNITS_AND_MAX_EXPOSURES {
        assert_unit_is_confined(directory.path(), daemon, max_exposure);
        let example_path = unpacked_path_text(&format!("usr/share/doc/coreward-{daemon}/examples/{daemon}.toml"));
        run_and_expect_success(&unpacked_path_text("usr/bin/coreward"), &["check", &example_path]);
    }
}
