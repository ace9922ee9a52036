//! `scripts/deb`: contents of the packages, and the verdict of systemd's tools on the units.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use coreward_testbed::fleet::coreward_command;
use coreward_testbed::{missing_testbed_rights, skip_if};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).current_dir(root()).output();
    output.unwrap_or_else(|error| panic!("{program}: {error} (scripts/install run)"))
}

fn run_successfully(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {printed}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

const UNITS: [(&str, f64); 5] = [("controller", 2.0), ("lb", 4.0), ("agent", 4.0), ("rack", 2.0), ("orchestrate", 3.0)];

/// Builds and unpacks the packages. Runs the command with its own libraries, man on the manual pages, and
/// systemd-analyze on the units.
#[test]
fn packages_contain_the_needed_files() {
    // The tools are installed only for root.
    skip_if!(missing_testbed_rights());
    let directory = tempfile::tempdir().unwrap();
    // out/deb is not used, because `make deb` may be writing there.
    let out = directory.path().join("packages");
    let command = coreward_command().unwrap();
    let variables = [format!("OUT={}", out.display()), format!("COREWARD={}", command.display())];
    let built = run_successfully("env", &[&variables[0], &variables[1], "LEVEL=1", "scripts/deb"]);
    let packages: Vec<&str> = built.lines().collect();
    assert_eq!(packages.len(), UNITS.len() + 2, "{built}");
    let into = directory.path().to_str().unwrap();
    for package in &packages {
        run_successfully("dpkg-deb", &["--extract", package, into]);
        assert_eq!(run_successfully("dpkg-deb", &["--field", package, "Version"]).trim(), env!("CARGO_PKG_VERSION"));
    }
    let depends = run_successfully("dpkg-deb", &["--field", packages[0], "Depends"]);
    assert!(depends.contains("libelf1") && depends.contains("libc6 (>="), "{depends}");
    let path = |path: &str| directory.path().join(path).to_str().unwrap().to_owned();
    assert!(run_successfully(&path("usr/bin/coreward"), &["--version"]).starts_with("coreward "));
    assert!(
        run_successfully("man", &["--local-file", &path("usr/share/man/man1/coreward-lb.1.gz")]).contains("--detach")
    );
    assert!(run_successfully(&path("usr/bin/coreward-lab"), &["--version"]).starts_with("coreward-lab "));
    assert!(
        run_successfully("man", &["--local-file", &path("usr/share/man/man1/coreward-lab-sim.1.gz")]).contains("trace")
    );
    for command in ["coreward", "coreward-lab"] {
        run_successfully("bash", &["-n", &path(&format!("usr/share/bash-completion/completions/{command}"))]);
    }

    for (daemon, highest) in UNITS {
        let unit = path(&format!("usr/lib/systemd/system/coreward-{daemon}.service"));
        // The unit names the command at its unpacked path, so that `verify` finds it.
        let text = std::fs::read_to_string(&unit).unwrap().replace("/usr/bin/coreward", &path("usr/bin/coreward"));
        let text = text.lines().filter(|line| !line.starts_with("Documentation=")).collect::<Vec<_>>().join("\n");
        std::fs::write(&unit, text).unwrap();
        let printed = run("systemd-analyze", &["verify", &unit]);
        assert!(
            printed.status.success() && printed.stderr.is_empty(),
            "{daemon}: {}",
            String::from_utf8_lossy(&printed.stderr)
        );
        let printed = run_successfully("systemd-analyze", &["security", "--offline=true", &unit]);
        let exposure = printed.lines().find_map(|line| line.split_once("exposure level for ")?.1.split_once(": "));
        let exposure: f64 = exposure.and_then(|(_, level)| level.split(' ').next()?.parse().ok()).expect("a level");
        assert!(exposure <= highest, "{daemon}: {exposure}");
        let example = path(&format!("usr/share/doc/coreward-{daemon}/examples/{daemon}.toml"));
        run_successfully(&path("usr/bin/coreward"), &["check", &example]);
    }
}
