-- Bitmaps of subtasks in blocks, which keep a script's work and arguments small; included by
-- scripts. Bit i % 8 (0 is the lowest) of byte floor(i / 8) of block b is subtask b * BLOCK + i.
-- Zeros at the end of a block are left out. The same as in learning/applied_record.py.
local BLOCK = 4096

local function block_of(subtask) return string.format('%.0f', math.floor(subtask / BLOCK)) end

-- `bits` is a block or false.
local function has_bit(bits, subtask)
  local at = subtask % BLOCK
  local byte = bits and string.byte(bits, math.floor(at / 8) + 1) or 0
  return bit.band(bit.rshift(byte, at % 8), 1) == 1
end

local function with_bit(bits, subtask)
  local at = subtask % BLOCK
  local place = math.floor(at / 8) + 1
  bits = bits .. string.rep('\0', place - #bits)
  local byte = bit.bor(string.byte(bits, place), bit.lshift(1, at % 8))
  return string.sub(bits, 1, place - 1) .. string.char(byte) .. string.sub(bits, place + 1)
end
