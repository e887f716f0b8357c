//! Whether the functions of a BPF object fit the kernel's stack.
//!
//! The verifier adds up the frames of functions that call one another: a chain of calls may take 512 bytes and consist
//! of 8 functions (`check_max_stack_depth` in `kernel/bpf/verifier.c`). Linux before 6.8 counts each frame as a
//! multiple of 32 bytes, a later one as a multiple of 16, so that it loads what an earlier one refuses. The earlier
//! rule is applied here, to the instructions, before any kernel sees them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::{Context, ensure};

/// Most bytes that a chain of calls may take (`MAX_BPF_STACK`).
pub const MOST_BYTES: u32 = 512;
/// Most functions of a chain of calls (`MAX_CALL_FRAMES`).
const MOST_FUNCTIONS: u32 = 8;
/// The bytes of a frame are rounded up to a multiple of this.
const ROUNDED_TO: u32 = 32;

/// Bytes of an instruction.
const LENGTH: u64 = 8;
/// The register that holds the end of the function's frame.
const FRAME_END: usize = 10;
/// The registers of arguments and result, which a call leaves undefined.
const OF_CALLS: std::ops::RangeInclusive<usize> = 0..=5;

/// Codes of instructions (RFC 9669): the class is in the lower three bits.
mod code {
    pub(super) const LDX: u8 = 1;
    pub(super) const ST: u8 = 2;
    pub(super) const STX: u8 = 3;
    pub(super) const ALU64: u8 = 7;
    /// `r1 += 1`, 64 bits.
    pub(super) const ADD_NUMBER: u8 = 0x07;
    /// `r1 = r2`, 64 bits.
    pub(super) const MOVE: u8 = 0xbf;
    pub(super) const GOTO: u8 = 0x05;
    pub(super) const FAR_GOTO: u8 = 0x06;
    pub(super) const CALL: u8 = 0x85;
    pub(super) const EXIT: u8 = 0x95;
    pub(super) const JMP: u8 = 5;
    pub(super) const JMP32: u8 = 6;
    /// The source of a call of a function in the object.
    pub(super) const OF_OBJECT: u8 = 1;
    /// The mode of a store that is an operation on memory, in the upper three bits.
    pub(super) const ATOMIC: u8 = 0xc0;
}

/// An instruction of BPF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Instruction {
    code: u8,
    destination: u8,
    source: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    /// The instruction with these bytes, in little-endian order.
    pub fn read([code, registers, a, b, c, d, e, f]: [u8; 8]) -> Self {
        Self {
            code,
            destination: registers & 15,
            source: registers >> 4,
            offset: i16::from_le_bytes([a, b]),
            immediate: i32::from_le_bytes([c, d, e, f]),
        }
    }

    fn class(&self) -> u8 {
        self.code & 7
    }

    fn calls_function(&self) -> bool {
        self.code == code::CALL && self.source == code::OF_OBJECT
    }
}

/// A place in an object: the number of the section, and the byte in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The section.
    pub section: usize,
    /// The byte.
    pub offset: u64,
}

/// A function of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Its symbol.
    pub name: String,
    /// Where it begins.
    pub at: Place,
    /// Whether it is a program, which the kernel runs for an event, and not only a function that others call.
    pub is_program: bool,
    /// Its code.
    pub code: Vec<Instruction>,
    /// The places of the symbols that relocations refer to, by the number of the instruction.
    pub symbols: BTreeMap<usize, Place>,
}

impl Function {
    /// Bytes of its frame: the largest distance below the frame's end that the function reads, writes, or holds in a
    /// register as an address.
    fn frame(&self) -> u32 {
        let mut lowest = 0_i32;
        // For each register, its distance from the frame's end, as far as a linear pass over the instructions shows
        // it.
        let mut pointers: [Option<i32>; 16] = [None; 16];
        pointers[FRAME_END] = Some(0);
        for it in &self.code {
            let (to, from) = (usize::from(it.destination), usize::from(it.source));
            let reached = match it.class() {
                code::LDX => pointers[from].map(|at| at.saturating_add(it.offset.into())),
                code::ST | code::STX => pointers[to].map(|at| at.saturating_add(it.offset.into())),
                code::ALU64 if it.code == code::ADD_NUMBER => {
                    pointers[to].map(|at| at.saturating_add(it.immediate))
                }
                code::ALU64 if it.code == code::MOVE => pointers[from],
                _ => None,
            };
            lowest = lowest.min(reached.unwrap_or(0));
            match (it.class(), it.code) {
                // It may load an earlier value from memory into a register.
                (code::STX, of) if of & 0xe0 == code::ATOMIC => (pointers[from], pointers[0]) = (None, None),
                (code::ST | code::STX, _) => {}
                (code::ALU64, code::ADD_NUMBER | code::MOVE) => pointers[to] = reached,
                (_, code::CALL) => pointers[OF_CALLS].fill(None),
                // The next instruction is reached by a jump from elsewhere.
                (_, code::GOTO | code::FAR_GOTO | code::EXIT) => pointers[..FRAME_END].fill(None),
                (code::JMP | code::JMP32, _) => {}
                _ => pointers[to] = None,
            }
        }
        lowest.unsigned_abs()
    }

    /// Bytes that the kernel counts for its frame.
    fn counted(&self) -> u32 {
        self.frame().max(1).next_multiple_of(ROUNDED_TO)
    }

    /// The addresses of the functions that it calls.
    fn called(&self) -> impl Iterator<Item = Place> + '_ {
        let calls = self.code.iter().enumerate().filter(|(_, it)| it.calls_function());
        calls.map(|(number, call)| {
            // Counted from the instruction after the call, or after where the symbol is.
            let here = Place { offset: self.at.offset + LENGTH * number as u64, ..self.at };
            let from = self.symbols.get(&number).copied().unwrap_or(here);
            let distance = LENGTH as i64 * (i64::from(call.immediate) + 1);
            Place { offset: from.offset.wrapping_add_signed(distance), ..from }
        })
    }
}

/// Functions of which each calls the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain<'o> {
    functions: Vec<&'o Function>,
}

impl Chain<'_> {
    /// Bytes of the kernel's stack that it takes.
    pub fn bytes(&self) -> u32 {
        self.functions.iter().map(|function| function.counted()).sum()
    }
}

/// As `na_a 96 (of 90), na_b 32 (of 0)`.
impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, function) in self.functions.iter().enumerate() {
            let before = if number == 0 { "" } else { ", " };
            write!(f, "{before}{} {} (of {})", function.name, function.counted(), function.frame())?;
        }
        Ok(())
    }
}

/// Checks every chain of calls that begins with a program. Returns the chain that takes the most of the stack;
/// `None`: there is no program.
///
/// # Errors
/// A chain takes more of the stack, or has more functions, than allowed; a function calls itself, or an address that
/// is no function of the object.
pub fn check(functions: &[Function]) -> anyhow::Result<Option<Chain<'_>>> {
    let calls = calls(functions)?;
    let (mut by_bytes, mut by_number) = (BTreeMap::new(), BTreeMap::new());
    let mut deepest: Option<Chain<'_>> = None;
    for (number, _) in functions.iter().enumerate().filter(|(_, function)| function.is_program) {
        let chain_by = |weight: fn(&Function) -> u32, known: &mut Known| {
            let (weight, chain) = heaviest(number, (functions, &calls), weight, &mut Vec::new(), known)?;
            let functions = chain.into_iter().filter_map(|number| functions.get(number)).collect();
            Ok::<_, anyhow::Error>((weight, Chain { functions }))
        };
        let (bytes, chain) = chain_by(Function::counted, &mut by_bytes)?;
        ensure!(
            bytes <= MOST_BYTES,
            "a chain of calls takes {bytes} bytes of the kernel's stack, of {MOST_BYTES} (Linux before 6.8 counts each \
             frame as a multiple of {ROUNDED_TO}): {chain}"
        );
        let (count, longest) = chain_by(|_| 1, &mut by_number)?;
        ensure!(
            count <= MOST_FUNCTIONS,
            "a chain of calls has {count} functions, where the kernel takes {MOST_FUNCTIONS}: {longest}"
        );
        if deepest.as_ref().is_none_or(|deepest| deepest.bytes() < bytes) {
            deepest = Some(chain);
        }
    }
    Ok(deepest)
}

/// By function, those that it calls.
fn calls(functions: &[Function]) -> anyhow::Result<Vec<BTreeSet<usize>>> {
    let numbers: BTreeMap<Place, usize> =
        functions.iter().enumerate().map(|(number, function)| (function.at, number)).collect();
    let of_one = |function: &Function| -> anyhow::Result<BTreeSet<usize>> {
        let number = |place: Place| {
            let number = numbers.get(&place).copied();
            number.with_context(|| format!("{} calls what is no function: {place:?}", function.name))
        };
        function.called().map(number).collect()
    };
    functions.iter().map(of_one).collect()
}

/// By function, the chain that begins with it and weighs the most, with its weight.
type Known = BTreeMap<usize, (u32, Vec<usize>)>;

/// The chain of calls that begins with a function and weighs the most. `above`: the functions on the path of calls to
/// it.
fn heaviest(
    from: usize,
    object: (&[Function], &[BTreeSet<usize>]),
    weight: fn(&Function) -> u32,
    above: &mut Vec<usize>,
    known: &mut Known,
) -> anyhow::Result<(u32, Vec<usize>)> {
    if let Some(found) = known.get(&from) {
        return Ok(found.clone());
    }
    let (functions, calls) = object;
    let function = &functions[from];
    ensure!(!above.contains(&from), "{} calls itself, or is called by what it calls", function.name);
    above.push(from);
    let mut most = (0, Vec::new());
    for called in &calls[from] {
        let chain = heaviest(*called, object, weight, above, known)?;
        if chain.0 > most.0 {
            most = chain;
        }
    }
    above.pop();
    most.0 += weight(function);
    most.1.insert(0, from);
    known.insert(from, most.clone());
    Ok(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXIT: Instruction = number(code::EXIT, 0, 0);

    const fn instruction(code: u8, destination: u8, source: u8, offset: i16) -> Instruction {
        Instruction { code, destination, source, offset, immediate: 0 }
    }

    const fn number(code: u8, destination: u8, immediate: i32) -> Instruction {
        Instruction { code, destination, source: 0, offset: 0, immediate }
    }

    /// `*(u64 *)(r10 + offset) = r1`
    const fn store(offset: i16) -> Instruction {
        instruction(0x7b, 10, 1, offset)
    }

    /// `register = r10`
    const fn frame_end(register: u8) -> Instruction {
        instruction(code::MOVE, register, 10, 0)
    }

    /// A call of the function that begins so many instructions after the next one.
    const fn call(distance: i32) -> Instruction {
        Instruction { source: code::OF_OBJECT, ..number(code::CALL, 0, distance) }
    }

    fn frame_of(code: &[Instruction]) -> u32 {
        function("f", 0, code.to_vec()).frame()
    }

    fn function(name: &str, begin: usize, code: Vec<Instruction>) -> Function {
        let at = Place { section: 2, offset: LENGTH * begin as u64 };
        Function { name: name.to_owned(), at, is_program: false, code, symbols: BTreeMap::new() }
    }

    /// A program, and functions of which each calls the next one: with frames of these many bytes.
    fn chain(frames: &[i16]) -> Vec<Function> {
        let last = frames.len() - 1;
        let one = |(number, bytes): (usize, &i16)| {
            let mut code = vec![store(-bytes), call(1), EXIT];
            if number == last {
                code[1] = EXIT;
            }
            function(&format!("f{number}"), 3 * number, code)
        };
        let mut functions: Vec<Function> = frames.iter().enumerate().map(one).collect();
        functions[0].is_program = true;
        functions
    }

    #[test]
    fn an_instruction_is_read_from_its_bytes() {
        let read = Instruction::read([0x7b, 0x1a, 0xf8, 0xff, 0xfe, 0xff, 0xff, 0xff]);
        assert_eq!(read, Instruction { immediate: -2, ..store(-8) });
    }

    #[test]
    fn a_frame_reaches_to_the_lowest_byte_that_is_used_or_pointed_to() {
        let cases: [(&[Instruction], u32); 14] = [
            (&[EXIT], 0),
            (&[store(-8), store(-24), store(-16)], 24),
            // `*(u8 *)(r10 - 33) = 0`, `r1 = *(u32 *)(r10 - 36)`
            (&[instruction(0x72, 10, 0, -33)], 33),
            (&[instruction(0x61, 1, 10, -36)], 36),
            // The callee writes the memory that is passed to it.
            (&[frame_end(2), number(code::ADD_NUMBER, 2, -40)], 40),
            (&[frame_end(2), number(code::ADD_NUMBER, 2, -40), number(code::ADD_NUMBER, 2, 16)], 40),
            (&[frame_end(2), instruction(0x7b, 2, 1, -48)], 48),
            (&[frame_end(2), number(code::ADD_NUMBER, 2, -8), instruction(0x79, 3, 2, -8)], 16),
            (&[frame_end(6), instruction(code::MOVE, 7, 6, 0), number(code::ADD_NUMBER, 7, -56)], 56),
            // No address of the frame: an address in the packet, a number, a value left by a call or other code.
            (&[instruction(0x79, 2, 1, -64), number(code::ADD_NUMBER, 2, -64)], 0),
            (&[frame_end(2), number(0xb7, 2, 0), number(code::ADD_NUMBER, 2, -64)], 0),
            (&[frame_end(2), frame_end(6), call(9), store(-8), instruction(0x7b, 2, 1, -64)], 8),
            (&[frame_end(6), call(9), instruction(0x7b, 6, 1, -72)], 72),
            (&[frame_end(6), number(code::GOTO, 0, 0), instruction(0x7b, 6, 1, -64)], 0),
        ];
        for (code, expected) in cases {
            assert_eq!(frame_of(code), expected, "{code:?}");
        }
    }

    #[test]
    fn a_chain_may_take_all_of_the_stack_and_no_more() {
        let functions = chain(&[96, 120, 200, 16, 0]);
        let deepest = check(&functions).unwrap().unwrap();
        assert_eq!((deepest.bytes(), deepest.functions.len()), (512, 5));
        let functions = chain(&[97, 120, 200, 16, 0]);
        assert_eq!(
            check(&functions).unwrap_err().to_string(),
            "a chain of calls takes 544 bytes of the kernel's stack, of 512 (Linux before 6.8 counts each frame as a \
             multiple of 32): f0 128 (of 97), f1 128 (of 120), f2 224 (of 200), f3 32 (of 16), f4 32 (of 0)"
        );
    }

    #[test]
    fn a_chain_has_eight_functions_and_no_more() {
        let functions = chain(&[0; 8]);
        assert_eq!(check(&functions).unwrap().unwrap().bytes(), 256);
        let functions = chain(&[0; 9]);
        let said = check(&functions).unwrap_err().to_string();
        assert!(
            said.starts_with("a chain of calls has 9 functions, where the kernel takes 8: f0 32 (of 0), "),
            "{said}"
        );
    }

    #[test]
    fn of_several_calls_the_deepest_counts_and_only_of_programs() {
        // f0 calls f1, which takes little, and f3, which takes more; f2 is called by none.
        let functions = [
            Function { is_program: true, ..function("f0", 0, vec![call(1), call(4), call(0), EXIT]) },
            function("f1", 2, vec![]),
            function("f2", 10, vec![store(-600)]),
            function("f3", 6, vec![store(-100)]),
            function("f4", 3, vec![]),
        ];
        let deepest = check(&functions).unwrap().unwrap();
        assert_eq!(deepest.to_string(), "f0 32 (of 0), f3 128 (of 100)");
        assert_eq!(check(&functions[1..]).unwrap(), None);
    }

    #[test]
    fn a_call_with_a_symbol_is_counted_from_there() {
        let symbol = |offset| BTreeMap::from([(0, Place { section: 4, offset })]);
        let other =
            Function { at: Place { section: 4, offset: 80 }, ..function("other", 0, vec![store(-8)]) };
        // The symbol of the function, and that of its section with the distance in the instruction.
        for (symbols, distance) in [(symbol(80), -1), (symbol(0), 9)] {
            let program =
                Function { is_program: true, symbols, ..function("program", 0, vec![call(distance), EXIT]) };
            let functions = [program, other.clone()];
            let deepest = check(&functions).unwrap().unwrap();
            assert_eq!(deepest.to_string(), "program 32 (of 0), other 32 (of 8)");
        }
    }

    #[test]
    fn calls_of_what_is_no_function_and_in_a_circle_are_errors() {
        let mut functions = chain(&[8, 8]);
        functions[0].code[1] = call(2);
        assert_eq!(
            check(&functions).unwrap_err().to_string(),
            "f0 calls what is no function: Place { section: 2, offset: 32 }"
        );
        let mut functions = chain(&[8, 8]);
        functions[1].code[1] = call(-5);
        assert_eq!(
            check(&functions).unwrap_err().to_string(),
            "f0 calls itself, or is called by what it calls"
        );
    }
}
