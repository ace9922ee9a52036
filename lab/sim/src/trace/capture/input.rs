//! Input file, which is decompressed while it is read. Its first bytes determine its format, not its name.

use std::fs::File;
use std::io::{self, BufReader, Chain, Cursor, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::error::CaptureError;
use crate::trace::TraceError;

/// Format of a file, as detected from its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceFileFormat {
    Pcap,
    Pcapng,
    ArrivalLog,
    /// gzip (RFC 1952).
    Gzip,
    Xz,
    /// Zstandard (RFC 8878).
    Zstd,
    Unknown,
}

/// Length of the longest magic number that identifies a format (bytes).
const MAX_MAGIC_NUMBER_BYTES: usize = 6;

pub fn detect_format(first_bytes: &[u8]) -> TraceFileFormat {
    match first_bytes {
        // These are the formats with microseconds and with nanoseconds, in both byte orders.
        [0xa1, 0xb2, 0xc3, 0xd4, ..] | [0xd4, 0xc3, 0xb2, 0xa1, ..] => TraceFileFormat::Pcap,
        [0xa1, 0xb2, 0x3c, 0x4d, ..] | [0x4d, 0x3c, 0xb2, 0xa1, ..] => TraceFileFormat::Pcap,
        [0x0a, 0x0d, 0x0d, 0x0a, ..] => TraceFileFormat::Pcapng,
        [b'c', b'o', b'r', b'e', b'w', b'a', ..] => TraceFileFormat::ArrivalLog,
        [0x1f, 0x8b, ..] => TraceFileFormat::Gzip,
        [0xfd, b'7', b'z', b'X', b'Z', 0x00, ..] => TraceFileFormat::Xz,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => TraceFileFormat::Zstd,
        _ => TraceFileFormat::Unknown,
    }
}

/// Reader of a file from its beginning, including the magic number that has already been read.
pub type BoxedReader = Box<dyn Read + Send>;

/// Opened file whose format is known.
pub struct OpenedTraceFile {
    /// Reader of the decompressed contents.
    pub reader: BoxedReader,
    /// Format of the decompressed contents.
    pub format: TraceFileFormat,
}

/// Opens a trace file, which may be compressed once. Fails when it cannot be read, or is neither a capture nor an
/// arrival log.
pub fn open_trace_file(path: &Path) -> Result<OpenedTraceFile, TraceError> {
    let path_to_text = || path.display().to_string();
    let to_file_error = |error| TraceError::UnreadableFile { path: path_to_text(), error };
    let file = File::open(path).map_err(to_file_error)?;
    let (first_bytes, mut reader) = peek_magic_number(file).map_err(to_file_error)?;
    let mut format = detect_format(&first_bytes);
    let mut first_bytes = first_bytes;
    if matches!(format, TraceFileFormat::Gzip | TraceFileFormat::Xz | TraceFileFormat::Zstd) {
        let (inner_first_bytes, inner_reader) = peek_magic_number(decompress(format, reader)).map_err(to_file_error)?;
        (format, first_bytes, reader) = (detect_format(&inner_first_bytes), inner_first_bytes, inner_reader);
    }
    match format {
        TraceFileFormat::Pcap | TraceFileFormat::Pcapng | TraceFileFormat::ArrivalLog => {
            Ok(OpenedTraceFile { reader, format })
        }
        _ => {
            Err(TraceError::InvalidCapture { path: path_to_text(), error: CaptureError::UnknownFormat { first_bytes } })
        }
    }
}

fn decompress(format: TraceFileFormat, reader: BoxedReader) -> BoxedReader {
    let reader = BufReader::with_capacity(1 << 16, reader);
    match format {
        TraceFileFormat::Gzip => Box::new(MultiGzDecoder::new(reader)),
        TraceFileFormat::Xz => Box::new(XzReader::new(reader, true)),
        _ => Box::new(ZstdReader { source: reader, decoder: FrameDecoder::new(), is_in_frame: false }),
    }
}

/// Returns the first bytes of the input, and a reader that returns them again before the rest.
fn peek_magic_number(mut reader: impl Read + Send + 'static) -> io::Result<(Vec<u8>, BoxedReader)> {
    let mut first_bytes = Vec::with_capacity(MAX_MAGIC_NUMBER_BYTES);
    reader.by_ref().take(MAX_MAGIC_NUMBER_BYTES as u64).read_to_end(&mut first_bytes)?;
    let complete_reader: Chain<Cursor<Vec<u8>>, _> = Cursor::new(first_bytes.clone()).chain(reader);
    Ok((first_bytes, Box::new(complete_reader)))
}

/// Reader of all frames in a Zstandard file. The library's decoder alone would stop after the first frame.
struct ZstdReader {
    source: BufReader<BoxedReader>,
    decoder: FrameDecoder,
    is_in_frame: bool,
}

impl ZstdReader {
    /// Starts the next frame, after skippable frames if any. Returns whether there is a next frame.
    fn start_next_frame(&mut self) -> io::Result<bool> {
        loop {
            if io::BufRead::fill_buf(&mut self.source)?.is_empty() {
                return Ok(false);
            }
            match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    io::copy(&mut self.source.by_ref().take(u64::from(length)), &mut io::sink())?;
                }
                Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            }
        }
    }
}

impl Read for ZstdReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.is_in_frame {
                self.is_in_frame = self.start_next_frame()?;
                if !self.is_in_frame {
                    return Ok(0);
                }
            }
            if self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let strategy = BlockDecodingStrategy::UptoBytes(buffer.len());
                let result = self.decoder.decode_blocks(&mut self.source, strategy);
                result.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            }
            let byte_count = self.decoder.read(buffer)?;
            if byte_count > 0 || buffer.is_empty() {
                return Ok(byte_count);
            }
            self.is_in_frame = !self.decoder.is_finished();
        }
    }
}
