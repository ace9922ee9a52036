//! Writes a generated trace as a capture: `cargo run --release -p coreward-sim --example campus_pcap -- campus:seconds=60 96
//! FILE` (snap length in bytes).

use std::fs::File;
use std::io::BufWriter;

use anyhow::Context as _;
use coreward_sim::trace::Source;
use coreward_sim::trace::capture::{ReadOptions, writer};

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [source, snap_length, path] = &arguments[..] else {
        anyhow::bail!("expected: SOURCE SNAP_LENGTH FILE, as in campus:seconds=60 96 campus.pcap");
    };
    let mut trace = source.parse::<Source>()?.open(1, ReadOptions::default())?;
    let snap_length = snap_length.parse().with_context(|| format!("snap length {snap_length:?}"))?;
    let out = BufWriter::with_capacity(1 << 20, File::create(path).with_context(|| path.clone())?);
    let packets = writer::write(trace.as_mut(), snap_length, out)?;
    println!("{packets} packets");
    Ok(())
}
