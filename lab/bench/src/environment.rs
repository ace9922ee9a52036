//! Build, machine, kernel and date of a measurement, and the other load on the machine.

use std::fs;
use std::process::Command;

use anyhow::Context as _;

/// Cargo profile that built this program, which is "dist" for published figures.
pub const CARGO_PROFILE: &str = env!("COREWARD_PROFILE");

/// Returns a sentence with the date, commit, cargo profile, machine and kernel of a measurement.
pub fn describe_measurement_environment() -> String {
    let cpu_count = std::thread::available_parallelism().map_or(0, usize::from);
    let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu_model =
        cpu_info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|(_, name)| name);
    let kernel_release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let commit =
        read_command_output("git", &["describe", "--always", "--dirty"]).unwrap_or_else(|| "unknown".to_owned());
    let date = read_command_output("date", &["-u", "+%F"]).unwrap_or_default();
    format!(
        "Measured {date} at commit {commit}, Cargo profile {CARGO_PROFILE}, on {} ({cpu_count} CPUs), Linux {}.",
        cpu_model.unwrap_or("an unknown CPU"),
        kernel_release.trim(),
    )
}

/// Meter of the machine's load from other processes and other guests during a run.
pub struct BackgroundLoadMeter {
    /// Load average over the last minute before the run, as in /proc/loadavg.
    load_average_at_start: String,
    cpu_times_at_start: TotalCpuTicks,
}

impl BackgroundLoadMeter {
    /// Starts the measurement of the load. Fails without /proc.
    pub fn start() -> anyhow::Result<Self> {
        let loadavg_line = fs::read_to_string("/proc/loadavg").context("/proc/loadavg")?;
        let load_average = loadavg_line.split_whitespace().next().context("/proc/loadavg is empty")?.to_owned();
        Ok(Self { load_average_at_start: load_average, cpu_times_at_start: TotalCpuTicks::read_proc_stat()? })
    }

    /// Returns a sentence with the background load before and during the run. Fails without /proc.
    pub fn describe_background_load(&self) -> anyhow::Result<String> {
        let stolen_pct = TotalCpuTicks::read_proc_stat()?.stolen_cpu_pct_since(&self.cpu_times_at_start);
        let load_average = &self.load_average_at_start;
        Ok(format!(
            "The load average before the run was {load_average}. During the run the hypervisor gave {stolen_pct:.1} % \
             of the CPU time to other guests (steal)."
        ))
    }
}

/// Sums over all CPUs of the times in /proc/stat, in ticks.
struct TotalCpuTicks {
    total_ticks: u64,
    stolen_ticks: u64,
}

impl TotalCpuTicks {
    fn read_proc_stat() -> anyhow::Result<Self> {
        let proc_stat = fs::read_to_string("/proc/stat").context("/proc/stat")?;
        Self::parse_proc_stat(&proc_stat).context("/proc/stat has no times of all CPUs")
    }

    fn parse_proc_stat(text: &str) -> Option<Self> {
        // The columns are user nice system idle iowait irq softirq steal. The times of guests are also in `user`.
        let tick_columns = text.lines().next()?.strip_prefix("cpu ")?.split_whitespace().take(8);
        let ticks: Vec<u64> = tick_columns.map(|time| time.parse().ok()).collect::<Option<_>>()?;
        Some(Self { total_ticks: ticks.iter().sum(), stolen_ticks: *ticks.get(7)? })
    }

    /// Returns the percentage of the time since `earlier_ticks` that the hypervisor gave to other guests (steal).
    fn stolen_cpu_pct_since(&self, earlier_ticks: &Self) -> f64 {
        let elapsed_ticks = self.total_ticks - earlier_ticks.total_ticks;
        if elapsed_ticks == 0 {
            0.0
        } else {
            (self.stolen_ticks - earlier_ticks.stolen_ticks) as f64 / elapsed_ticks as f64 * 100.0
        }
    }
}

fn read_command_output(command: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(command).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurement_description_names_cargo_profile_and_kernel() {
        let description = describe_measurement_environment();
        assert!(
            description.contains(&format!("profile {CARGO_PROFILE}")) && description.contains("Linux "),
            "{description}"
        );
        assert!(!CARGO_PROFILE.is_empty() && CARGO_PROFILE != "build", "{CARGO_PROFILE}");
    }

    #[test]
    fn stolen_pct_is_stolen_ticks_divided_by_all_elapsed_ticks() {
        let parse_ticks = |text| TotalCpuTicks::parse_proc_stat(text).unwrap();
        let earlier_ticks = parse_ticks("cpu  10 0 10 70 5 1 2 2 50 0\ncpu0 0 0\n");
        let later_ticks = parse_ticks("cpu  20 0 20 140 5 1 2 12 90 0\n");
        assert_eq!(later_ticks.stolen_cpu_pct_since(&earlier_ticks), 10.0);
        assert!(TotalCpuTicks::parse_proc_stat("cpu  1 2 3\n").is_none());
    }
}
