//! How busy the cores are: the busy time of each, in ns, absolute.
//!
//! * [`cpu`]: of the CPU that serves each receive queue
//! * [`published`]: of emulated cores, as their server publishes it
//! * [`queues`]: which CPU serves which receive queue

pub mod cpu;
pub mod published;
pub mod queues;

/// Where busy times come from.
pub trait LoadSource: Send {
    /// Appends the busy time of each core since some fixed moment (ns), in the order of receive queues.
    ///
    /// # Errors
    /// When it cannot be read now; it may be later.
    fn read(&mut self, busy_ns: &mut Vec<u64>) -> anyhow::Result<()>;

    /// Follows changes: `cpu_of_queue` is the CPU that serves each receive queue. Called about once a second.
    fn refresh(&mut self, cpu_of_queue: &[usize]);

    /// What is wrong, in words for `coreward status`.
    fn warnings(&self) -> Vec<String> {
        vec![]
    }
}
