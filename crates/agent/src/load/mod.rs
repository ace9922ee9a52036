//! Measures the total busy time of each core in ns.
//!
//! * [`cpu`]: busy times of the CPUs that serve the receive queues
//! * [`published`]: busy times of emulated cores, from a file that the server application writes
//! * [`receive_queue_cpus`]: the CPU that serves each receive queue

pub mod cpu;
pub mod published;
pub mod receive_queue_cpus;

/// Source of the cores' busy times.
pub trait LoadSource: Send {
    /// Appends the total busy time of each core in ns, in the order of the receive queues. Fails if it cannot be read.
    fn append_busy_times(&mut self, busy_ns: &mut Vec<u64>) -> anyhow::Result<()>;

    /// Sets the CPU that serves each receive queue. Called about once per second.
    fn set_queue_cpus(&mut self, cpu_of_queue: &[usize]);

    /// Returns the source's current problems as warnings for `coreward status`.
    fn warnings(&self) -> Vec<String> {
        vec![]
    }
}
