//! Busy time of each core, in ns, absolute.
//!
//! * [`cpu`]: of the CPU that serves each receive queue
//! * [`published`]: of emulated cores, from the server's file
//! * [`queues`]: the CPU that serves each receive queue

pub mod cpu;
pub mod published;
pub mod queues;

/// Source of busy times.
pub trait LoadSource: Send {
    /// Appends the busy time of each core (ns, absolute), in the order of receive queues. Fails when it cannot be read
    /// now.
    fn read(&mut self, busy_ns: &mut Vec<u64>) -> anyhow::Result<()>;

    /// Updates the CPU that serves each receive queue, about once a second.
    fn refresh(&mut self, cpu_of_queue: &[usize]);

    /// Returns the faults as text for `coreward status`.
    fn warnings(&self) -> Vec<String> {
        vec![]
    }
}
