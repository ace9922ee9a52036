//! Checks of the kernel and of this process's capabilities.

use crate::facts::{Facts, Role};
use crate::finding::{Finding, Fix};

/// Oldest supported kernel version, major and minor (docs/limits.md).
const MIN_KERNEL: (u32, u32) = (6, 1);

/// Returns the major and minor version of a kernel release, as `uname -r` prints it.
pub(super) fn parse_kernel_version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

pub fn kernel(facts: &Facts) -> Vec<Finding> {
    let release = &facts.kernel.release;
    if parse_kernel_version(release) < MIN_KERNEL {
        let why = "older kernels lack features of the BPF programs: no daemon starts";
        return vec![
            Finding::fault(format!("Linux {release}"), why)
                .with_remediation("apt install linux-image-amd64  # Debian 12 or newer"),
        ];
    }
    if !facts.kernel.has_btf {
        let why = "the BPF programs that read the kernel's own structures (cpu_load) need its types";
        let remedy = "a kernel with CONFIG_DEBUG_INFO_BTF=y";
        return vec![
            Finding::fault(format!("Linux {release} without /sys/kernel/btf/vmlinux"), why).with_remediation(remedy),
        ];
    }
    vec![Finding::ok(format!("Linux {release} with BTF"))]
}

pub fn rights(facts: &Facts) -> Vec<Finding> {
    if facts.missing_rights.is_empty() {
        return vec![Finding::ok("all capabilities of a daemon in the packet path")];
    }
    let why = "loading and attaching BPF programs requires them: the daemon does not start";
    let names = facts.missing_rights.join(", ");
    let capabilities = facts.missing_rights.join(" ");
    vec![
        Finding::fault(format!("missing: {names}"), why)
            .with_remediation(format!("run as root, or in the systemd unit: AmbientCapabilities={capabilities}")),
    ]
}

pub fn programs(facts: &Facts) -> Vec<Finding> {
    if facts.kernel.programs.is_empty() {
        return vec![Finding::unknown("not tried: capabilities are missing")];
    }
    let refused: Vec<_> = facts.kernel.programs.iter().filter(|(_, answer)| answer.is_err()).collect();
    if refused.is_empty() {
        let names: Vec<&str> = facts.kernel.programs.keys().copied().collect();
        return vec![Finding::ok(format!("taken: {}", names.join(", ")))];
    }
    let why = "the daemon does not start";
    let of = |(name, answer): (&&str, &Result<(), String>)| {
        let reason = answer.as_ref().err().map_or("", String::as_str);
        Finding::fault(format!("the kernel rejects {name}: {reason}"), why).with_remediation(
            "coreward check-kernel  # the whole error; required: CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF, \
                      CONFIG_XDP_SOCKETS, as in Debian's kernels",
        )
    };
    refused.into_iter().map(of).collect()
}

pub fn jit(facts: &Facts) -> Vec<Finding> {
    let path = "net/core/bpf_jit_enable";
    match facts.sysctl(path) {
        // The sysctl is visible only in the first network namespace.
        None => vec![Finding::unknown("net.core.bpf_jit_enable is not visible here")],
        Some(0) => {
            let why = "every packet runs the programs, which take about ten times as long when interpreted";
            vec![Finding::warning("net.core.bpf_jit_enable is 0: expected 1", why).with_sysctl(
                path.to_owned(),
                "1",
                true,
            )]
        }
        Some(value) => vec![Finding::ok(format!("net.core.bpf_jit_enable is {value}"))],
    }
}

pub fn bpf_file_system(facts: &Facts) -> Vec<Finding> {
    let place = &facts.bpf_file_system;
    let directory = place.directory.display();
    if place.is_bpf {
        return vec![Finding::ok(format!("{directory} is on a BPF file system"))];
    }
    let why = "programs and maps are pinned there to outlive the daemon, which does not start without it";
    let finding = Finding::fault(format!("{directory} is not on a BPF file system"), why);
    let below = facts.settings.pin_directory.as_ref().is_none_or(|pins| pins.starts_with("/sys/fs/bpf"));
    vec![if below {
        finding.with_fix(Fix::MountBpf)
    } else {
        finding.with_remediation("name a `pin_directory` below /sys/fs/bpf")
    }]
}

pub fn pins(facts: &Facts) -> Vec<Finding> {
    let Some(problem) = &facts.pins_problem else { return vec![Finding::ok("no pins of another version")] };
    let (why, command) = match facts.role {
        Role::Lb => ("the daemon does not start: the pinned program forwards packets now", "lb"),
        _ => ("the agent does not take the pins over: stamped connections break", "agent"),
    };
    let remedy = format!(
        "start the version that made it, or drain, then `coreward {command} --config FILE --detach` by that version"
    );
    vec![Finding::fault(problem.clone(), why).with_remediation(remedy)]
}

/// Minimum limit of open files: pins, maps, sockets, links and /proc. The controller needs one more per peer.
const MIN_DAEMON_OPEN_FILES: u64 = 1024;
const MIN_CONTROLLER_OPEN_FILES: u64 = 4096;

pub fn open_files(facts: &Facts) -> Vec<Finding> {
    let (needed, peers) = match facts.role {
        Role::Controller => (MIN_CONTROLLER_OPEN_FILES, "a connection to every agent and load balancer"),
        _ => (MIN_DAEMON_OPEN_FILES, "maps, links, and a descriptor for every socket of a service"),
    };
    let found = format!("up to {} files may be open", facts.open_files_limit);
    if facts.open_files_limit >= needed {
        return vec![Finding::ok(found)];
    }
    let why = format!("the daemon holds {peers}: it fails at the limit");
    let remedy = format!("ulimit -Hn {needed}; in the systemd unit: LimitNOFILE={needed}");
    vec![Finding::fault(format!("{found}: expected {needed}"), &why).with_remediation(remedy)]
}
