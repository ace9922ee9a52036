//! Checks of the kernel, this process's capabilities and its limit of open files.

use crate::facts::{MachineFacts, MachineRole};
use crate::finding::{AutomaticFix, Finding};

/// Major and minor version number of the oldest supported kernel (docs/limits.md).
const MIN_KERNEL_VERSION: (u32, u32) = (6, 1);

/// Returns the major and minor version in a kernel release, which has the form that `uname -r` prints.
pub(super) fn parse_kernel_version(release: &str) -> (u32, u32) {
    let mut version_numbers = release.split(['.', '-']).map_while(|number_text| number_text.parse::<u32>().ok());
    (version_numbers.next().unwrap_or(0), version_numbers.next().unwrap_or(0))
}

pub fn check_kernel(facts: &MachineFacts) -> Vec<Finding> {
    let kernel_release = &facts.kernel.release;
    if parse_kernel_version(kernel_release) < MIN_KERNEL_VERSION {
        let consequence = "older kernels lack features of the BPF programs: no daemon starts";
        return vec![
            Finding::fault(format!("Linux {kernel_release}"), consequence)
                .with_remedy_step("apt install linux-image-amd64  # Debian 12 or newer"),
        ];
    }
    if !facts.kernel.has_btf {
        let consequence = "the BPF programs that read the kernel's own structures (cpu_load) need its types";
        let remedy = "a kernel with CONFIG_DEBUG_INFO_BTF=y";
        return vec![
            Finding::fault(format!("Linux {kernel_release} without /sys/kernel/btf/vmlinux"), consequence)
                .with_remedy_step(remedy),
        ];
    }
    vec![Finding::ok(format!("Linux {kernel_release} with BTF"))]
}

pub fn check_process_capabilities(facts: &MachineFacts) -> Vec<Finding> {
    if facts.missing_capabilities.is_empty() {
        return vec![Finding::ok("all capabilities of a daemon in the packet path")];
    }
    let consequence = "loading and attaching BPF programs requires them: the daemon does not start";
    let missing_names = facts.missing_capabilities.join(", ");
    let missing_capabilities = facts.missing_capabilities.join(" ");
    vec![
        Finding::fault(format!("missing: {missing_names}"), consequence).with_remedy_step(format!(
            "run as root, or in the systemd unit: AmbientCapabilities={missing_capabilities}"
        )),
    ]
}

pub fn check_bpf_programs(facts: &MachineFacts) -> Vec<Finding> {
    if facts.kernel.program_load_results.is_empty() {
        return vec![Finding::unknown("not tried: capabilities are missing")];
    }
    let rejected_programs: Vec<_> =
        facts.kernel.program_load_results.iter().filter(|(_, answer)| answer.is_err()).collect();
    if rejected_programs.is_empty() {
        let program_names: Vec<&str> = facts.kernel.program_load_results.keys().copied().collect();
        return vec![Finding::ok(format!("taken: {}", program_names.join(", ")))];
    }
    let consequence = "the daemon does not start";
    let to_finding = |(name, load_result): (&&str, &Result<(), String>)| {
        let rejection_reason = load_result.as_ref().err().map_or("", String::as_str);
        Finding::fault(format!("the kernel rejects {name}: {rejection_reason}"), consequence).with_remedy_step(
            "coreward check-kernel  # the whole error; required: CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF, \
                      CONFIG_XDP_SOCKETS, as in Debian's kernels",
        )
    };
    rejected_programs.into_iter().map(to_finding).collect()
}

pub fn check_bpf_jit(facts: &MachineFacts) -> Vec<Finding> {
    let jit_sysctl = "net/core/bpf_jit_enable";
    match facts.sysctl_value(jit_sysctl) {
        // The sysctl exists only in the initial network namespace.
        None => vec![Finding::unknown("net.core.bpf_jit_enable is not visible here")],
        Some(0) => {
            let consequence = "every packet runs the programs, which take about ten times as long when interpreted";
            vec![Finding::warning("net.core.bpf_jit_enable is 0: expected 1", consequence).with_sysctl_remedy(
                jit_sysctl.to_owned(),
                "1",
                true,
            )]
        }
        Some(value) => vec![Finding::ok(format!("net.core.bpf_jit_enable is {value}"))],
    }
}

pub fn check_bpf_file_system(facts: &MachineFacts) -> Vec<Finding> {
    let pin_file_system = &facts.bpf_file_system;
    let directory = pin_file_system.nearest_existing_directory.display();
    if pin_file_system.is_bpf_file_system {
        return vec![Finding::ok(format!("{directory} is on a BPF file system"))];
    }
    let consequence = "programs and maps are pinned there to outlive the daemon, which does not start without it";
    let finding = Finding::fault(format!("{directory} is not on a BPF file system"), consequence);
    let is_below_default_mount =
        facts.settings.pin_directory.as_ref().is_none_or(|pins| pins.starts_with("/sys/fs/bpf"));
    vec![if is_below_default_mount {
        finding.with_automatic_fix(AutomaticFix::MountBpf)
    } else {
        finding.with_remedy_step("name a `pin_directory` below /sys/fs/bpf")
    }]
}

pub fn check_pin_takeover(facts: &MachineFacts) -> Vec<Finding> {
    let Some(problem) = &facts.pin_takeover_problem else { return vec![Finding::ok("no pins of another version")] };
    let (consequence, command) = match facts.role {
        MachineRole::Lb => ("the daemon does not start: the pinned program forwards packets now", "lb"),
        _ => ("the agent does not take the pins over: stamped connections break", "agent"),
    };
    let remedy = format!(
        "start the version that made it, or drain, then `coreward {command} --config FILE --detach` by that version"
    );
    vec![Finding::fault(problem.clone(), consequence).with_remedy_step(remedy)]
}

/// Minimum limit of open files for a daemon. Its pins, maps, sockets, links and files in /proc count. A controller also
/// needs one file per peer.
const MIN_DAEMON_OPEN_FILE_LIMIT: u64 = 1024;
const MIN_CONTROLLER_OPEN_FILE_LIMIT: u64 = 4096;

pub fn check_open_files_limit(facts: &MachineFacts) -> Vec<Finding> {
    let (min_open_files, held_descriptors) = match facts.role {
        MachineRole::Controller => (MIN_CONTROLLER_OPEN_FILE_LIMIT, "a connection to every agent and load balancer"),
        _ => (MIN_DAEMON_OPEN_FILE_LIMIT, "maps, links, and a descriptor for every socket of a service"),
    };
    let observation = format!("up to {} files may be open", facts.open_files_limit);
    if facts.open_files_limit >= min_open_files {
        return vec![Finding::ok(observation)];
    }
    let consequence = format!("the daemon holds {held_descriptors}: it fails at the limit");
    let remedy = format!("ulimit -Hn {min_open_files}; in the systemd unit: LimitNOFILE={min_open_files}");
    vec![Finding::fault(format!("{observation}: expected {min_open_files}"), &consequence).with_remedy_step(remedy)]
}
