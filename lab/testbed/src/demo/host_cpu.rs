//! CPU load of the machine: without spare CPU time, latencies and paced cores are meaningless.

use anyhow::Context as _;

/// Meter of the share of CPU time that the host was not idle, summed over several periods.
#[derive(Debug, Default)]
pub struct CpuMeter {
    started: Ticks,
    total: Ticks,
}

#[derive(Debug, Clone, Copy, Default)]
struct Ticks {
    busy: u64,
    idle: u64,
}

impl CpuMeter {
    /// Creates a meter. Fails when /proc/stat has an unexpected format.
    pub fn new() -> anyhow::Result<Self> {
        read().map(|started| Self { started, total: Ticks::default() })
    }

    /// Starts a measured period. Fails when /proc/stat has an unexpected format.
    pub fn start(&mut self) -> anyhow::Result<()> {
        self.started = read()?;
        Ok(())
    }

    /// Ends the measured period. Fails when /proc/stat has an unexpected format.
    pub fn stop(&mut self) -> anyhow::Result<()> {
        let now = read()?;
        self.total.busy += now.busy - self.started.busy;
        self.total.idle += now.idle - self.started.idle;
        Ok(())
    }

    /// Returns the busy share of CPU time over all measured periods (%).
    pub fn busy_pct(&self) -> f64 {
        100.0 * self.total.busy as f64 / (self.total.busy + self.total.idle).max(1) as f64
    }
}

fn read() -> anyhow::Result<Ticks> {
    let text = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    parse(&text).context("the first line of /proc/stat is not as in proc(5)")
}

/// Parses the first line of /proc/stat, `cpu user nice system idle iowait irq softirq steal ...`: proc(5).
fn parse(text: &str) -> Option<Ticks> {
    let numbers = text.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = numbers.split_whitespace().map(str::parse).collect::<Result<_, _>>().ok()?;
    let idle = ticks.get(3)? + ticks.get(4)?;
    // `user` includes the guests' times, which follow the eighth field.
    let all: u64 = ticks.iter().take(8).sum();
    Some(Ticks { busy: all - idle, idle })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_and_iowait_are_not_busy() {
        let ticks = parse("cpu  10 1 5 70 10 1 2 1 99 0\ncpu0 ...").unwrap();
        assert_eq!((ticks.busy, ticks.idle), (20, 80));
        assert!(parse("intr 5").is_none());
    }
}
