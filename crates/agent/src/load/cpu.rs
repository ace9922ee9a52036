use coreward_dataplane::cpu_load::CpuLoad;

use super::LoadSource;

#[derive(Debug)]
pub struct CpuLoadSource {
    load: CpuLoad,
    cpu_of_queue: Vec<usize>,
}

impl CpuLoadSource {
    /// Starts counting the busy time of the CPUs. Fails when the kernel rejects the BPF program.
    pub fn start() -> anyhow::Result<Self> {
        Ok(Self { load: CpuLoad::start()?, cpu_of_queue: vec![] })
    }
}

impl LoadSource for CpuLoadSource {
    fn read(&mut self, busy_ns: &mut Vec<u64>) -> anyhow::Result<()> {
        busy_ns.extend(self.cpu_of_queue.iter().map(|cpu| self.load.busy_ns(*cpu)));
        Ok(())
    }

    fn refresh(&mut self, cpu_of_queue: &[usize]) {
        self.cpu_of_queue = cpu_of_queue.to_vec();
    }

    fn warnings(&self) -> Vec<String> {
        let mut cpus = self.cpu_of_queue.clone();
        cpus.sort_unstable();
        cpus.dedup();
        let (queues, cpus) = (self.cpu_of_queue.len(), cpus.len());
        if cpus == queues {
            return vec![];
        }
        vec![format!("{queues} receive queues are served by {cpus} CPUs: expected one CPU for each")]
    }
}
