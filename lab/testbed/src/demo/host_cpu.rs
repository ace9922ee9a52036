//! CPU load of the machine. Without spare CPU time, measured latencies and paced cores are meaningless.

use anyhow::Context as _;

/// Meter of the machine's CPU usage, as the busy share of the CPU time in all measured periods together.
#[derive(Debug, Default)]
pub struct HostCpuMeter {
    period_start_ticks: HostCpuTicks,
    measured_ticks: HostCpuTicks,
}

#[derive(Debug, Clone, Copy, Default)]
struct HostCpuTicks {
    busy_ticks: u64,
    idle_ticks: u64,
}

impl HostCpuMeter {
    /// Creates a meter. Fails when /proc/stat has an unexpected format.
    pub fn new() -> anyhow::Result<Self> {
        read_cpu_ticks()
            .map(|start_ticks| Self { period_start_ticks: start_ticks, measured_ticks: HostCpuTicks::default() })
    }

    /// Starts a measured period. Fails when /proc/stat has an unexpected format.
    pub fn start_period(&mut self) -> anyhow::Result<()> {
        self.period_start_ticks = read_cpu_ticks()?;
        Ok(())
    }

    /// Ends the measured period. Fails when /proc/stat has an unexpected format.
    pub fn end_period(&mut self) -> anyhow::Result<()> {
        let current_ticks = read_cpu_ticks()?;
        self.measured_ticks.busy_ticks += current_ticks.busy_ticks - self.period_start_ticks.busy_ticks;
        self.measured_ticks.idle_ticks += current_ticks.idle_ticks - self.period_start_ticks.idle_ticks;
        Ok(())
    }

    /// Returns the busy share of the CPU time over all measured periods (%).
    pub fn busy_pct(&self) -> f64 {
        100.0 * self.measured_ticks.busy_ticks as f64
            / (self.measured_ticks.busy_ticks + self.measured_ticks.idle_ticks).max(1) as f64
    }
}

fn read_cpu_ticks() -> anyhow::Result<HostCpuTicks> {
    let text = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    parse_cpu_ticks(&text).context("the first line of /proc/stat is not as in proc(5)")
}

/// Parses the first line of /proc/stat, which is `cpu user nice system idle iowait irq softirq steal ...` (proc(5)).
fn parse_cpu_ticks(text: &str) -> Option<HostCpuTicks> {
    let tick_fields = text.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = tick_fields.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    let idle_ticks = ticks.get(3)? + ticks.get(4)?;
    // Guests' times follow the eighth field, and must not be added because `user` includes them.
    let total_ticks: u64 = ticks.iter().take(8).sum();
    Some(HostCpuTicks { busy_ticks: total_ticks - idle_ticks, idle_ticks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iowait_counts_as_idle_time() {
        let ticks = parse_cpu_ticks("cpu  10 1 5 70 10 1 2 1 99 0\ncpu0 ...").unwrap();
        assert_eq!((ticks.busy_ticks, ticks.idle_ticks), (20, 80));
        assert!(parse_cpu_ticks("intr 5").is_none());
    }
}
