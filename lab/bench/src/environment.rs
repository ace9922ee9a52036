//! Build, machine, kernel and date of a figure, and other load on the machine.

use std::fs;
use std::process::Command;

use anyhow::Context as _;

/// Cargo profile that built this program: "dist" for published figures.
pub const PROFILE: &str = env!("COREWARD_PROFILE");

/// Returns a sentence with the date, commit, cargo profile, machine and kernel of a measurement.
pub fn describe() -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model =
        cpu_info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": ")).map(|(_, name)| name);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let commit = output("git", &["describe", "--always", "--dirty"]).unwrap_or_else(|| "unknown".to_owned());
    let day = output("date", &["-u", "+%F"]).unwrap_or_default();
    format!(
        "Measured {day} at commit {commit}, profile {PROFILE}, on {} ({cpus} CPUs), Linux {}.",
        model.unwrap_or("an unknown CPU"),
        kernel.trim(),
    )
}

/// Measures the load that other processes and other guests put on the machine during a run.
pub struct BackgroundLoad {
    /// Load average of the last minute before the run, as in /proc/loadavg.
    load_average: String,
    cpu_times: CpuTimes,
}

impl BackgroundLoad {
    /// Starts the measurement of the load. Fails without /proc.
    pub fn start() -> anyhow::Result<Self> {
        let averages = fs::read_to_string("/proc/loadavg").context("/proc/loadavg")?;
        let load_average = averages.split_whitespace().next().context("/proc/loadavg is empty")?.to_owned();
        Ok(Self { load_average, cpu_times: CpuTimes::read()? })
    }

    /// Returns a sentence with the load before and during the run. Fails without /proc.
    pub fn describe(&self) -> anyhow::Result<String> {
        let stolen = CpuTimes::read()?.stolen_since(&self.cpu_times);
        let load_average = &self.load_average;
        Ok(format!(
            "Load average before the run: {load_average}; stolen by the host during it: {stolen:.1} % of the CPUs."
        ))
    }
}

/// Sums of the times of all CPUs in /proc/stat, in ticks.
struct CpuTimes {
    all: u64,
    stolen: u64,
}

impl CpuTimes {
    fn read() -> anyhow::Result<Self> {
        let text = fs::read_to_string("/proc/stat").context("/proc/stat")?;
        Self::parse(&text).context("/proc/stat has no times of all CPUs")
    }

    fn parse(text: &str) -> Option<Self> {
        // user nice system idle iowait irq softirq steal; guests' times are in `user`, too.
        let times = text.lines().next()?.strip_prefix("cpu ")?.split_whitespace().take(8);
        let times: Vec<u64> = times.map(|time| time.parse().ok()).collect::<Option<_>>()?;
        Some(Self { all: times.iter().sum(), stolen: *times.get(7)? })
    }

    /// Returns the percentage of the time since `earlier` that the hypervisor gave to other guests (steal).
    fn stolen_since(&self, earlier: &Self) -> f64 {
        let all = self.all - earlier.all;
        if all == 0 { 0.0 } else { (self.stolen - earlier.stolen) as f64 / all as f64 * 100.0 }
    }
}

fn output(command: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(command).args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentence_names_profile_and_kernel() {
        let sentence = describe();
        assert!(sentence.contains(&format!("profile {PROFILE}")) && sentence.contains("Linux "), "{sentence}");
        assert!(!PROFILE.is_empty() && PROFILE != "build", "{PROFILE}");
    }

    #[test]
    fn stolen_time_is_a_part_of_all_time() {
        let times = |text| CpuTimes::parse(text).unwrap();
        let earlier = times("cpu  10 0 10 70 5 1 2 2 50 0\ncpu0 0 0\n");
        let later = times("cpu  20 0 20 140 5 1 2 12 90 0\n");
        assert_eq!(later.stolen_since(&earlier), 10.0);
        assert!(CpuTimes::parse("cpu  1 2 3\n").is_none());
    }
}
