use coreward_dataplane::cpu_load::CpuBusyTimeCounter;

use super::LoadSource;

#[derive(Debug)]
pub struct CpuBusyTimeSource {
    cpu_load_program: CpuBusyTimeCounter,
    cpu_of_queue: Vec<usize>,
}

impl CpuBusyTimeSource {
    /// Loads the BPF program that counts the CPUs' busy times. Fails when the kernel rejects it.
    pub fn start() -> anyhow::Result<Self> {
        Ok(Self { cpu_load_program: CpuBusyTimeCounter::start()?, cpu_of_queue: vec![] })
    }
}

impl LoadSource for CpuBusyTimeSource {
    fn append_busy_times(&mut self, busy_ns: &mut Vec<u64>) -> anyhow::Result<()> {
        busy_ns.extend(self.cpu_of_queue.iter().map(|cpu| self.cpu_load_program.cpu_busy_ns(*cpu)));
        Ok(())
    }

    fn set_queue_cpus(&mut self, cpu_of_queue: &[usize]) {
        self.cpu_of_queue = cpu_of_queue.to_vec();
    }

    fn warnings(&self) -> Vec<String> {
        let mut sorted_queue_cpus = self.cpu_of_queue.clone();
        sorted_queue_cpus.sort_unstable();
        sorted_queue_cpus.dedup();
        let (queue_count, cpu_count) = (self.cpu_of_queue.len(), sorted_queue_cpus.len());
        if cpu_count == queue_count {
            return vec![];
        }
        vec![format!("{queue_count} receive queues are served by {cpu_count} CPUs: expected one CPU for each")]
    }
}
