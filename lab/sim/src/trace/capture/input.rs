//! Input file, decompressed while reading. Its first bytes determine the format, not its name.

use std::fs::File;
use std::io::{self, BufReader, Chain, Cursor, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::error::CaptureError;
use crate::trace::TraceError;

/// Format of a file, which its first bytes determine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    Pcap,
    Pcapng,
    ArrivalLog,
    /// gzip (RFC 1952).
    Gzip,
    Xz,
    /// Zstandard (RFC 8878).
    Zstd,
    /// Any other format.
    Unknown,
}

/// Length of the longest magic number (bytes).
const MAGIC_BYTES: usize = 6;

pub fn detect_format(mark: &[u8]) -> FileFormat {
    match mark {
        // In both byte orders: microseconds, nanoseconds.
        [0xa1, 0xb2, 0xc3, 0xd4, ..] | [0xd4, 0xc3, 0xb2, 0xa1, ..] => FileFormat::Pcap,
        [0xa1, 0xb2, 0x3c, 0x4d, ..] | [0x4d, 0x3c, 0xb2, 0xa1, ..] => FileFormat::Pcap,
        [0x0a, 0x0d, 0x0d, 0x0a, ..] => FileFormat::Pcapng,
        [b'c', b'o', b'r', b'e', b'w', b'a', ..] => FileFormat::ArrivalLog,
        [0x1f, 0x8b, ..] => FileFormat::Gzip,
        [0xfd, b'7', b'z', b'X', b'Z', 0x00, ..] => FileFormat::Xz,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => FileFormat::Zstd,
        _ => FileFormat::Unknown,
    }
}

/// Reader of the input, including the magic number that was read before.
pub type Reader = Box<dyn Read + Send>;

/// Opened file whose format is known.
pub struct Input {
    /// Decompressed contents.
    pub reader: Reader,
    /// Format after decompression.
    pub format: FileFormat,
}

/// Opens a file and decompresses it, also repeatedly. Fails when it cannot be read, or is neither a capture nor an
/// arrival log.
pub fn open(path: &Path) -> Result<Input, TraceError> {
    let shown = || path.display().to_string();
    let failed = |error| TraceError::File { path: shown(), error };
    let file = File::open(path).map_err(failed)?;
    let (mark, mut reader) = peek(file).map_err(failed)?;
    let mut found = detect_format(&mark);
    let mut mark = mark;
    if matches!(found, FileFormat::Gzip | FileFormat::Xz | FileFormat::Zstd) {
        let (inner_mark, inner) = peek(decompress(found, reader)).map_err(failed)?;
        (found, mark, reader) = (detect_format(&inner_mark), inner_mark, inner);
    }
    match found {
        FileFormat::Pcap | FileFormat::Pcapng | FileFormat::ArrivalLog => Ok(Input { reader, format: found }),
        _ => Err(TraceError::Capture { path: shown(), error: CaptureError::UnknownFormat { mark } }),
    }
}

fn decompress(format: FileFormat, reader: Reader) -> Reader {
    let reader = BufReader::with_capacity(1 << 16, reader);
    match format {
        FileFormat::Gzip => Box::new(MultiGzDecoder::new(reader)),
        FileFormat::Xz => Box::new(XzReader::new(reader, true)),
        _ => Box::new(ZstdReader { source: reader, decoder: FrameDecoder::new(), in_frame: false }),
    }
}

/// Returns the first bytes, and a reader that returns them again.
fn peek(mut reader: impl Read + Send + 'static) -> io::Result<(Vec<u8>, Reader)> {
    let mut mark = Vec::with_capacity(MAGIC_BYTES);
    reader.by_ref().take(MAGIC_BYTES as u64).read_to_end(&mut mark)?;
    let again: Chain<Cursor<Vec<u8>>, _> = Cursor::new(mark.clone()).chain(reader);
    Ok((mark, Box::new(again)))
}

/// Reader of all frames of a Zstandard file; the library decodes a single frame.
struct ZstdReader {
    source: BufReader<Reader>,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl ZstdReader {
    /// Starts the next frame, after any skippable ones. Returns whether there is one.
    fn next_frame(&mut self) -> io::Result<bool> {
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
            if !self.in_frame {
                self.in_frame = self.next_frame()?;
                if !self.in_frame {
                    return Ok(0);
                }
            }
            if self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let strategy = BlockDecodingStrategy::UptoBytes(buffer.len());
                let decoded = self.decoder.decode_blocks(&mut self.source, strategy);
                decoded.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            }
            let read = self.decoder.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            self.in_frame = !self.decoder.is_finished();
        }
    }
}
